/** Which shares the user may change to. The service answers by the templates, so this takes some seconds. */

import { AskKind, IAskAnswer } from './status';

/** Templates change seldom; each question counts among the few asks that the agent takes in a minute. */
const FRESH_MS = 300_000;

export interface IShareChoices {
  /** Units of 1 %, the smallest first; empty: the service did not say. */
  units: number[];
  /** Why there are none. */
  text: string;
}

export class ShareChoices {
  /** `now` returns milliseconds. */
  constructor(
    private readonly _ask: (kind: AskKind) => Promise<IAskAnswer>,
    private readonly _now: () => number = Date.now
  ) {}

  /** Return the choices of a session with this share. What was answered is kept for some minutes. Throws nothing. */
  async of(shareUnits: number): Promise<IShareChoices> {
    const known = this._known;
    if (known !== undefined && known.shareUnits === shareUnits && this._now() - known.at < FRESH_MS) {
      return known.choices;
    }
    const answer = await this._ask('shares');
    const units = answer.done ? unitsOf(answer.text) : [];
    const choices = { units, text: units.length ? '' : answer.text };
    if (units.length) {
      this._known = { shareUnits, at: this._now(), choices };
    }
    return choices;
  }

  private _known: { shareUnits: number; at: number; choices: IShareChoices } | undefined;
}

/** Return the units in a JSON list; nothing of another text. */
function unitsOf(text: string): number[] {
  try {
    const said: unknown = JSON.parse(text);
    return Array.isArray(said) ? said.filter(one => Number.isInteger(one) && one > 0) : [];
  } catch {
    return [];
  }
}
