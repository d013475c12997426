/** The answers of `GET gpushare/status` and `GET gpushare/cells`, which notebook/extension.py writes. */

/** One execution of a cell. Other fields: `CellStatus` in model/share_status.py. */
export interface ICellCost {
  cell_id: string;
  running: boolean;
  /** GPU time, peak of memory and waits; empty: no GPU work. */
  line: string;
}

/** An idle action for which the user has a notice. */
export interface IPendingAction {
  tier: string;
  /** Seconds since the epoch. */
  at: number;
}

/** The share on one GPU. */
export interface IGpu {
  /** Fraction of the GPU's time that the session had in the last second, from 0 to 1; null: not reported. */
  utilisation: number | null;
}

/** One row of the share's terms. */
export interface ITerm {
  name: string;
  /** Contains `{time}` in place of an instant. */
  text: string;
  at: number | null;
}

/** An admin's message. */
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
  /** Time of the agent's answer, in seconds since the epoch; 0: it did not answer. */
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
  /** The meaning of the tier for the user, in sentences. */
  summary: string[];
  terms: ITerm[];
  why_slow: string[];
  dashboard: string;

  /** Whether an agent measures the session's GPU work and memory. */
  measured: boolean;
  /** The problem with the sharing layer that provides the GPU; empty: no known problem. */
  layer_trouble: string;

  /** The requests that the user can send to the service. */
  asks: AskKind[];
  /** Why other requests are not available; can be empty. */
  asks_text: string;
  /** Seconds since the epoch; null: the share is not kept. */
  keep_until: number | null;
  /** The requests that can replace the idle action in the notice. */
  notice_controls: AskKind[];
  /** The largest share that the session can be changed to, in units of 1 %; 0: it cannot be changed. */
  largest_share_units: number;
  share_units: number;
  /** Units on the last GPU if these are fewer than on each of the others; 0: as many. */
  last_units: number;
  /** The current messages, earliest first. */
  messages: IMessage[];
}

export type AskKind = 'keep' | 'end-keep' | 'release' | 'stop' | 'share' | 'shares' | 'keeps' | 'advice';

/** The answer of `POST gpushare/ask`. */
export interface IAskAnswer {
  done: boolean;
  text: string;
}
