/** The shares that the user may change to. The service determines them from the templates, which takes some seconds. */

import { AskKind, IAskAnswer } from './status';

/** Templates rarely change. */
const FRESH_MS = 300_000;
/** Time after which an answer without choices is requested again, because the service may have been busy. */
const AGAIN_MS = 15_000;

export interface IShareChoices {
  /** Units of 1 %, smallest first; empty: unknown. */
  units: number[];
  /** Why there are no choices. */
  text: string;
}

export class ShareChoices {
  /** `now` returns milliseconds. */
  constructor(
    private readonly _ask: (kind: AskKind) => Promise<IAskAnswer>,
    private readonly _now: () => number = Date.now
  ) {}

  /**
   * Return the choices of a session with this share: the same object until the service is asked again, some minutes
   * after a list, some seconds after a refusal. Throws nothing.
   */
  of(shareUnits: number): Promise<IShareChoices> {
    const known = this._known;
    if (known === undefined || known.shareUnits !== shareUnits || this._now() - known.at >= known.freshMs) {
      const asked = { shareUnits, at: this._now(), freshMs: FRESH_MS, choices: this._choices() };
      this._known = asked;
      void asked.choices.then(choices => {
        asked.freshMs = choices.units.length ? FRESH_MS : AGAIN_MS;
      });
    }
    return this._known!.choices;
  }

  private async _choices(): Promise<IShareChoices> {
    const answer = await this._ask('shares');
    const units = answer.done ? unitsOf(answer.text) : [];
    return { units, text: units.length ? '' : answer.text };
  }

  private _known: { shareUnits: number; at: number; freshMs: number; choices: Promise<IShareChoices> } | undefined;
}

/** Return the next larger free share; undefined if there is none. `largest`: units that the session can have now. */
export function preselected(units: readonly number[], share: number, largest: number): number | undefined {
  return units.find(one => one > share && one <= largest);
}

/** Return the units in a JSON list; none for other text. */
function unitsOf(text: string): number[] {
  try {
    const said: unknown = JSON.parse(text);
    return Array.isArray(said) ? said.filter(one => Number.isInteger(one) && one > 0) : [];
  } catch {
    return [];
  }
}
