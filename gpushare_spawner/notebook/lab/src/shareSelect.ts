/** The part of the dialog that changes the share: a list of the shares that the user may have, and a button. */

import { button, element } from './elements';
import { IOwnShare, IShareChoices, isFree, ownChoice, preselected, ShareChoices } from './shareChoices';
import { IShareStatus } from './status';
import * as words from './words';

export class ShareSelect {
  /** `change` gets the chosen units; `choices` has the units that the templates offer. */
  constructor(
    private readonly _choices: ShareChoices,
    change: (units: number) => void
  ) {
    this._select.setAttribute('aria-label', words.NEW_SHARE);
    const press = button(words.CHANGE, () => {
      if (this._select.value) {
        change(Number(this._select.value));
      } else {
        this._select.focus();
      }
    });
    this._select.onchange = () => {
      this._isChosen = true;
    };
    // JupyterLab wraps the list in another node
    this._choice.append(element('div', '', this._select), press);
    this._why.textContent = words.ASKING;
    this._choice.hidden = true;
    this.nodes = [this._choice, this._why];
  }

  /** The element for the dialog. */
  readonly nodes: HTMLElement[];

  showStatus(status: IShareStatus): void {
    this._own = status;
    if (status.largest_share_units) {
      void this._askFor(ownChoice(status));
    }
    // free units change while the list is open: update the texts, and the selection unless the user has chosen
    for (const option of Array.from(this._select.options)) {
      const text = this._text(Number(option.value), status);
      if (option.textContent !== text) {
        option.textContent = text;
      }
    }
    this._preselect();
  }

  private async _askFor(share: number): Promise<void> {
    const choices = await this._choices.of(share);
    const own = this._own;
    if (own === undefined || choices === this._shown || share !== ownChoice(own)) {
      return; // the share was changed in the meantime
    }
    this._shown = choices;
    this._why.textContent = choices.text;
    this._isChosen = false;
    this._select.replaceChildren(
      ...choices.units.map(units => {
        const option = element('option', '', this._text(units, own));
        option.value = String(units);
        return option;
      })
    );
    this._choice.hidden = !choices.units.length;
    this._preselect();
  }

  /** Preselect the next larger free share, which most users want, or none. */
  private _preselect(): void {
    if (!this._isChosen && this._own !== undefined) {
      const units = preselected(this._shown?.units ?? [], this._own);
      this._select.value = units === undefined ? '' : String(units);
    }
  }

  private _text(choice: number, own: IOwnShare): string {
    return words.shareChoice(choice, own.gpus.length, isFree(choice, own));
  }

  private _shown: IShareChoices | undefined;
  private _isChosen = false;
  private _own: IOwnShare | undefined;
  private readonly _select = element('select', 'jp-mod-styled');
  private readonly _choice = element('span', 'gpushare-Row');
  private readonly _why = element('span', '');
}
