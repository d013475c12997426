/** The item in the status bar: a button with a plot, so that the dialog is also accessible by keyboard and touch. */

import { Widget } from '@lumino/widgets';

import { atLocalTime, instantsInFull } from './localTime';
import { Plot } from './plot';
import { Samples } from './samples';
import { IShareStatus } from './status';
import * as words from './words';

/** Seconds that the small plot shows, fewer than the dialog's. */
const ITEM_SPAN = 120;

export class StatusItem extends Widget {
  constructor(
    private readonly _samples: Samples,
    open: () => void
  ) {
    super();
    this.id = 'gpushare-item';
    this.addClass('gpushare-Item');
    this._plot = new Plot(56, 16, ITEM_SPAN);
    this._button.type = 'button';
    this._button.setAttribute('aria-haspopup', 'dialog');
    this._button.addEventListener('click', open);
    this._button.append(this._plot.node, this._text);
    this.node.append(this._button);
    this.hide();
  }

  /** Show a status; undefined: the server is unavailable. */
  showStatus(status: IShareStatus | undefined): void {
    const line = status ? status.line : words.UNKNOWN;
    this.setHidden(!line || (!status && this.isHidden));
    this._text.textContent = line;
    const title = status ? atLocalTime(status.explanation, status.notice?.at) : words.SERVER_UNAVAILABLE;
    const instants = status ? instantsInFull(status.explanation, status.notice?.at) : '';
    this._button.title = instants ? `${title}\n${instants}` : title;
    this._button.setAttribute('aria-label', `${line}. ${title}`);
    const known = status?.known ? status : undefined;
    this.node.dataset.tier = known ? known.tier : 'unknown';
    this.node.dataset.lease = known ? known.lease : 'none';
    this.node.dataset.notice = known?.notice ? 'yes' : 'no';
    this.node.dataset.trouble = known?.layer_trouble ? 'yes' : 'no';
    this._plot.node.classList.toggle('gpushare-mod-hidden', !known?.measured);
    this._plot.draw(this._samples.all);
  }

  private readonly _button = document.createElement('button');
  private readonly _text = document.createElement('span');
  private readonly _plot: Plot;
}
