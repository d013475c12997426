/** The part of the dialog that changes the share: a list of the shares that the user may have, and a button. */

import { button, element } from './elements';
import { ShareChoices } from './shareChoices';
import { IShareStatus } from './status';
import * as words from './words';

export class ShareSelect {
  /** `change` gets the chosen units; `choices` knows those that the templates offer. */
  constructor(
    private readonly _choices: ShareChoices,
    change: (units: number) => void
  ) {
    this._select.setAttribute('aria-label', words.NEW_SHARE);
    const press = button(words.CHANGE, () => change(Number(this._select.value)));
    // JupyterLab puts a node of its own around the list
    this._choice.append(element('div', '', this._select), press);
    this._why.textContent = words.ASKING;
    this._showOptions(0);
    this.nodes = [this._choice, this._why];
  }

  /** What stands in the dialog. */
  readonly nodes: HTMLElement[];

  showStatus(status: IShareStatus): void {
    this._largest = status.largest_share_units;
    if (status.largest_share_units && status.share_units !== this._asked) {
      this._asked = status.share_units;
      void this._askFor(status.share_units);
    }
    // what is free changes while the list is open: only the texts follow
    for (const option of Array.from(this._select.options)) {
      const text = words.shareChoice(Number(option.value), this._largest);
      if (option.textContent !== text) {
        option.textContent = text;
      }
    }
  }

  private async _askFor(shareUnits: number): Promise<void> {
    const choices = await this._choices.of(shareUnits);
    if (shareUnits !== this._asked) {
      return; // the share was changed meanwhile
    }
    this._why.textContent = choices.text;
    this._units = choices.units;
    this._showOptions(choices.units.find(units => units > shareUnits));
  }

  /** `chosen`: the next larger share, which most who change theirs want; undefined: there is none. */
  private _showOptions(chosen: number | undefined): void {
    this._select.replaceChildren(
      ...this._units.map(units => {
        const option = element('option', '', words.shareChoice(units, this._largest));
        option.value = String(units);
        option.selected = units === chosen;
        return option;
      })
    );
    this._choice.hidden = !this._units.length;
  }

  private _asked: number | undefined;
  private _largest = 0;
  private _units: number[] = [];
  private readonly _select = element('select', 'jp-mod-styled');
  private readonly _choice = element('span', 'gpushare-Row');
  private readonly _why = element('span', '');
}
