/** The last minutes of GPU memory and use, from the server's successive answers. */

import { IShareStatus } from './status';

/** The part of a status that is drawn. */
export type Figures = Pick<IShareStatus, 'at' | 'gpus' | 'memory_bytes' | 'limit_bytes'>;

/** Fractions from 0 to 1; `use` is undefined if it is unknown. */
export interface ISample {
  at: number;
  memory: number;
  use: number | undefined;
}

export class Samples {
  /** Create storage for the samples of the last `span` seconds. */
  constructor(readonly span: number) {}

  get all(): readonly ISample[] {
    return this._samples;
  }

  get last(): ISample | undefined {
    return this._samples[this._samples.length - 1];
  }

  /** Add the server's answer. */
  add(now: Figures): void {
    const before = this.last?.at ?? 0;
    if (now.at === before) {
      return; // the same answer again, because the server shares it among tabs
    }
    if (now.at < before) {
      this._samples = []; // the clock was set back
    }
    this._samples.push({ at: now.at, memory: part(now.memory_bytes, now.limit_bytes), use: use(now) });
    this._samples = this._samples.filter(sample => sample.at > now.at - this.span);
  }

  private _samples: ISample[] = [];
}

/** Return the mean use of the session's GPUs; undefined if the agent does not report it. */
function use(now: Figures): number | undefined {
  const known = now.gpus.map(gpu => gpu.utilisation).filter(one => one !== null);
  return known.length
    ? part(
        known.reduce((sum, one) => sum + one, 0),
        known.length
      )
    : undefined;
}

function part(amount: number, total: number): number {
  return total > 0 ? Math.min(1, Math.max(0, amount / total)) : 0;
}

/** Return an SVG path through the known values, with gaps for unknown ones. The newest value is at the right. */
export function linePath(
  samples: readonly ISample[],
  value: (sample: ISample) => number | undefined,
  span: number,
  width: number,
  height: number
): string {
  const end = samples.length ? samples[samples.length - 1].at : 0;
  let path = '';
  let drawing = false;
  for (const sample of samples) {
    const y = value(sample);
    if (y === undefined) {
      drawing = false;
      continue;
    }
    const x = width * (1 - (end - sample.at) / span);
    path += `${drawing ? 'L' : 'M'}${x.toFixed(1)} ${(height * (1 - y)).toFixed(1)}`;
    drawing = true;
  }
  return path;
}
