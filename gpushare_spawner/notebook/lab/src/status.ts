/** What `GET gpushare/status` answers; notebook/extension.py writes it. */

/** An idle action that the user has a notice of. */
export interface IPendingAction {
  tier: string;
  /** Seconds since the epoch. */
  at: number;
}

/** The share on one GPU. */
export interface IGpu {
  /** Part of the GPU's time that the session had in the last second, from 0 to 1; null: the agent does not say. */
  utilisation: number | null;
}

/** One row of the share's terms. */
export interface ITerm {
  name: string;
  /** Has `{time}` in it where an instant is meant. */
  text: string;
  at: number | null;
}

/** A message of an admin. */
export interface IMessage {
  text: string;
  /** Seconds since the epoch; no two messages have the same. */
  at: number;
}

export interface IShareStatus {
  shared: boolean;
  known: boolean;
  tier: string;
  lease: string;
  /** Seconds since the epoch: when the agent said this; 0: it did not answer. */
  at: number;
  gpus: IGpu[];
  memory_bytes: number;
  limit_bytes: number;
  notice: IPendingAction | null;
  limit_hit: { count: number } | null;

  line: string;
  explanation: string;
  changed_text: string;
  notice_text: string;
  reclaimed_text: string;
  limit_text: string;
  /** What the tier means to the user, in sentences. */
  summary: string[];
  terms: ITerm[];
  why_slow: string[];
  dashboard: string;

  /** Whether an agent measures the session's GPU work and memory. */
  measured: boolean;
  /** What is wrong with the sharing layer that gives the GPU; empty: nothing is known to be. */
  layer_trouble: string;

  /** What the user can ask of the service. */
  asks: AskKind[];
  /** Why the user cannot ask for more; can be empty. */
  asks_text: string;
  /** Seconds since the epoch; null: the share is not kept. */
  keep_until: number | null;
  /** What the user may ask for instead of the idle action of the notice. */
  notice_controls: AskKind[];
  /** The largest share that the session can be changed to, in units of 1 %; 0: it cannot be changed. */
  largest_share_units: number;
  share_units: number;
  /** Those that stand, the earliest first. */
  messages: IMessage[];
}

export type AskKind = 'keep' | 'end-keep' | 'release' | 'stop' | 'share' | 'shares' | 'keeps';

/** What `POST gpushare/ask` answers. */
export interface IAskAnswer {
  done: boolean;
  text: string;
}
