/** The shares that the user may change to. The service determines them from the templates, which takes some seconds. */

import { AskKind, IAskAnswer, IShareStatus } from './status';

/** Templates rarely change. */
const FRESH_MS = 300_000;
/** Time after which an answer without choices is requested again, because the service may have been busy. */
const AGAIN_MS = 15_000;

export interface IShareChoices {
  /** Units of 1 % on each GPU, or 150 for a whole GPU and half of another, smallest first; empty: unknown. */
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
   * Return the choices of a session with this share (see `ownChoice`): the same object until the service is asked again, some minutes
   * after a list, some seconds after a refusal. Throws nothing.
   */
  of(share: number): Promise<IShareChoices> {
    const known = this._known;
    if (known === undefined || known.share !== share || this._now() - known.at >= known.freshMs) {
      const asked = { share, at: this._now(), freshMs: FRESH_MS, choices: this._choices() };
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

  private _known: { share: number; at: number; freshMs: number; choices: Promise<IShareChoices> } | undefined;
}

/** The part of a status by which shares are compared. */
export type IOwnShare = Pick<IShareStatus, 'share_units' | 'last_units' | 'largest_share_units' | 'gpus'>;

/** Return the session's share as a choice. */
export function ownChoice(own: IOwnShare): number {
  return own.last_units ? own.share_units * (own.gpus.length - 1) + own.last_units : own.share_units;
}

/** Return whether the session can have the share now. Beside whole GPUs only the last one can lack units. */
export function isFree(choice: number, own: IOwnShare): boolean {
  const most = choice < 100 ? choice : 100;
  return (own.share_units === 100 ? choice % 100 || most : most) <= own.largest_share_units;
}

/** Return the next larger free share; undefined if there is none. */
export function preselected(choices: readonly number[], own: IOwnShare): number | undefined {
  const total = (choice: number) => (choice > 100 ? choice : choice * own.gpus.length);
  const held = own.last_units ? ownChoice(own) : total(own.share_units);
  return choices.find(choice => total(choice) > held && isFree(choice, own));
}

/** Advice on the size of the share, by the GPU work of the last days. */
export interface IShareAdvice {
  /** The advised share, in units of 1 % of a GPU. */
  units: number;
  text: string;
}

/** Return the advice in an answer; undefined if there is none, also from an older agent or service. */
export function adviceOf(answer: IAskAnswer): IShareAdvice | undefined {
  try {
    const said = answer.done ? (JSON.parse(answer.text) as Partial<IShareAdvice> | null) : null;
    const { units, text } = said ?? {};
    return typeof units === 'number' && Number.isInteger(units) && units > 0 && typeof text === 'string'
      ? { units, text }
      : undefined;
  } catch {
    return undefined;
  }
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
