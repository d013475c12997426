/** The dialog: the terms of the share, why it is slow, and the user's possible actions. */

import { Dialog, showDialog } from '@jupyterlab/apputils';
import { Widget } from '@lumino/widgets';

import { HOUR, IControls, KEEP_HOURS } from './controls';
import { button, element, setLines, withZone } from './elements';
import { atLocalTime, clock, inFull, localised, secondsUntil } from './localTime';
import { Plot } from './plot';
import { Samples } from './samples';
import { ShareChoices } from './shareChoices';
import { ShareSelect } from './shareSelect';
import { AskKind, IShareStatus } from './status';
import * as words from './words';

/** Opens at most one dialog at a time, and keeps it up to date. */
export class ShareDialog {
  constructor(
    private readonly _samples: Samples,
    private readonly _controls: IControls
  ) {
    this._choices = new ShareChoices(kind => _controls.ask(kind));
  }

  open(): void {
    if (this._body !== undefined || this._status === undefined) {
      return;
    }
    const body = new ShareBody(this._samples, this._controls, this._choices);
    body.showStatus(this._status);
    this._body = body;
    const buttons = [Dialog.okButton({ label: words.CLOSE })];
    void showDialog({ title: words.TITLE, body, buttons }).finally(() => {
      this._body = undefined;
    });
  }

  showStatus(status: IShareStatus | undefined): void {
    this._status = status ?? this._status;
    if (status !== undefined) {
      this._body?.showStatus(status);
    }
  }

  private _status: IShareStatus | undefined;
  private _body: ShareBody | undefined;
  private readonly _choices: ShareChoices;
}

class ShareBody extends Widget {
  constructor(
    private readonly _samples: Samples,
    private readonly _asking: IControls,
    choices: ShareChoices
  ) {
    super();
    this.addClass('gpushare-Dialog');
    this._plot = new Plot(320, 64, _samples.span);
    this._figure.append(this._plot.node, this._caption);
    this._slow.append(element('summary', '', words.WHY_SLOW), this._why);
    this._answer.setAttribute('role', 'status');
    this._dashboard.target = '_blank';
    this._dashboard.rel = 'noopener';
    this._releasedAlready.id = 'gpushare-released-already';
    this._release.setAttribute('aria-describedby', this._releasedAlready.id);
    this._select = new ShareSelect(choices, units => void this._ask('share', units));
    this._share = fieldset(words.CHANGE_SHARE, ...this._select.nodes);
    this._share.classList.add('gpushare-Share');
    this._controls.append(this._keep, this._share, this._endControls());
    this.node.append(
      this._messages,
      this._explanation,
      this._figure,
      this._controls,
      this._missing,
      this._answer,
      this._slow,
      this._terms
    );
  }

  showStatus(status: IShareStatus): void {
    setLines(
      this._messages,
      'p',
      status.messages.map(message => `${words.MESSAGE}: ${message.text}`)
    );
    const terms = status.terms;
    // the terms are complete; without them, there is only the reason why the share is unknown
    setLines(this._explanation, 'p', terms.length ? status.summary : [status.explanation]);
    this._showTerms(status);
    this._showPlot(status);
    this._slow.hidden = !status.why_slow.length;
    setLines(this._why, 'li', status.why_slow);
    const asks = status.known ? status.asks : [];
    this._controls.hidden = !asks.length;
    this._keep.hidden = !asks.includes('keep');
    if (!this._keep.hidden && !this._hasReadKeeps) {
      void this._readKeeps();
    }
    this._showMissing(status, asks);
    const kept = status.keep_until;
    this._kept.textContent = kept === null ? '' : words.kept(clock(kept));
    this._kept.title = kept === null ? '' : inFull(kept);
    this._endKeep.hidden = kept === null;
    this._share.hidden = !asks.includes('share');
    this._select.showStatus(status);
    this._release.hidden = !asks.includes('release');
    const isReleased = status.tier === 'released';
    // not `disabled`, because the pressed button would lose the focus, and Escape would not close the dialog
    this._release.ariaDisabled = String(isReleased);
    this._releasedAlready.textContent = isReleased ? words.RELEASED_ALREADY : '';
  }

  /** Show why some requests are not available, and where else the user can act. */
  private _showMissing(status: IShareStatus, asks: readonly AskKind[]): void {
    setLines(this._missingText, 'p', status.asks_text ? [status.asks_text] : []);
    this._dashboard.href = status.dashboard;
    this._dashboard.hidden = !status.asks_text || asks.length > 0 || !status.dashboard;
  }

  private _showTerms(status: IShareStatus): void {
    const rows = status.terms.map(term => ({ ...term, shown: atLocalTime(term.text, term.at) }));
    const said = JSON.stringify(rows);
    if (said === this._said) {
      return; // preserve a text selection
    }
    this._said = said;
    this._terms.replaceChildren(
      ...rows.map(({ name, shown, text, at }) => {
        const head = element('th', '', name);
        head.scope = 'row';
        return element('tr', '', head, withZone(element('td', '', shown), text, at));
      })
    );
  }

  private _showPlot(status: IShareStatus): void {
    const last = this._samples.last;
    this._figure.hidden = !status.known || last === undefined;
    this._plot.draw(this._samples.all);
    if (last !== undefined) {
      this._caption.textContent = words.plotted(this._samples.span / 60, last.memory, last.use);
    }
  }

  private _keepControls(): HTMLElement {
    const until = element('input', 'jp-mod-styled');
    until.type = 'time';
    until.setAttribute('aria-label', words.KEEP_UNTIL_LABEL);
    const keepUntil = () => {
      const seconds = secondsUntil(until.value);
      if (seconds !== undefined) {
        void this._ask('keep', seconds);
      } else {
        until.focus();
      }
    };
    return fieldset(
      words.KEEP,
      ...KEEP_HOURS.map(hours => button(words.keepHours(hours), () => void this._ask('keep', hours * HOUR))),
      element('span', 'gpushare-Row', until, button(words.KEEP_UNTIL_BUTTON, keepUntil)),
      element('span', 'gpushare-Row', this._kept, this._endKeep),
      this._keepsLeft
    );
  }

  /** Show the user's remaining keeps, or nothing if an older agent or service does not report them. */
  private async _readKeeps(): Promise<void> {
    this._hasReadKeeps = true;
    const answer = await this._asking.ask('keeps');
    this._keepsLeft.textContent = answer.done ? answer.text : '';
  }

  /** Release, and stop with a confirmation, because it ends the kernels. */
  private _endControls(): HTMLElement {
    const warning = element('span', 'gpushare-Warning', words.STOP_WARNING);
    const confirm = element('div', 'gpushare-Confirm', warning);
    const stop = button(
      words.STOP,
      () => {
        // with a long answer, the dialog would be too tall for its window
        this._answer.textContent = '';
        confirm.hidden = false;
        cancel.focus();
      },
      true
    );
    this._endConfirmation = (focus: boolean) => {
      confirm.hidden = true;
      if (focus) {
        stop.focus();
      }
    };
    const cancel = button(words.CANCEL, () => this._endConfirmation(true));
    confirm.setAttribute('role', 'alert');
    confirm.append(
      button(words.STOP_CONFIRM, () => void this._ask('stop'), true),
      cancel
    );
    confirm.hidden = true;
    return fieldset(words.END, this._release, stop, this._releasedAlready, confirm);
  }

  private async _ask(kind: AskKind, value = 0): Promise<void> {
    this._endConfirmation(false);
    this._answer.textContent = words.ASKING;
    for (const one of this._buttons()) {
      one.disabled = true;
    }
    const focused = document.activeElement;
    const answer = await this._asking.ask(kind, value);
    for (const one of this._buttons()) {
      one.disabled = false;
    }
    if (focused instanceof HTMLElement && this.node.contains(focused)) {
      focused.focus();
    }
    this._answer.textContent = localised(answer.text);
    this._answer.scrollIntoView({ block: 'nearest' });
    this._answer.dataset.done = answer.done ? 'yes' : 'no';
    if (kind === 'keep') {
      void this._readKeeps();
    }
  }

  private _buttons(): HTMLButtonElement[] {
    return Array.from(this._controls.querySelectorAll('button'));
  }

  private _said = '';
  private readonly _plot: Plot;
  private readonly _messages = element('div', 'gpushare-Message');
  private readonly _explanation = element('div', '');
  private readonly _caption = element('figcaption', '');
  private readonly _figure = element('figure', '');
  private readonly _terms = element('table', 'gpushare-Terms');
  private readonly _why = element('ul', '');
  private readonly _slow = element('details', '');
  private readonly _controls = element('div', 'gpushare-Controls');
  private readonly _missingText = element('div', '');
  private readonly _dashboard = element('a', '', words.DASHBOARD);
  private readonly _missing = element('div', 'gpushare-Missing', this._missingText, this._dashboard);
  private readonly _kept = element('span', 'gpushare-Kept');
  private readonly _endKeep = button(words.END_KEEP, () => void this._ask('end-keep'));
  private readonly _release = button(words.RELEASE, () => {
    if (this._release.ariaDisabled !== 'true') {
      void this._ask('release');
    }
  });
  private readonly _releasedAlready = element('span', '');
  private _hasReadKeeps = false;
  private readonly _keepsLeft = element('span', '');
  private readonly _keep = this._keepControls();
  private _endConfirmation: (focus: boolean) => void = () => undefined;
  private readonly _select: ShareSelect;
  private readonly _share: HTMLFieldSetElement;
  private readonly _answer = element('div', 'gpushare-Answer');
}

function fieldset(legend: string, ...children: HTMLElement[]): HTMLFieldSetElement {
  return element('fieldset', '', element('legend', '', legend), element('div', 'gpushare-Fields', ...children));
}
