/** The last minutes of GPU memory and use, from successive answers of the server. */

/** What of a status is drawn. */
export interface IFigures {
  /** Seconds since the epoch. */
  at: number;
  gpus: unknown[];
  memory_bytes: number;
  limit_bytes: number;
  gpu_seconds: number | null;
}

/** Parts from 0 to 1; `use` is undefined where it is unknown. */
export interface ISample {
  at: number;
  memory: number;
  use: number | undefined;
}

export class Samples {
  /** Keep the samples of the last `span` seconds. */
  constructor(readonly span: number) {}

  get all(): readonly ISample[] {
    return this._samples;
  }

  get last(): ISample | undefined {
    return this._samples[this._samples.length - 1];
  }

  /** Add an answer of the server. The use is the GPU time since the answer before, of the time that passed. */
  add(now: IFigures): void {
    const before = this._before;
    if (before !== undefined && now.at <= before.at) {
      if (now.at === before.at) {
        return; // the same answer, for another tab
      }
      this._samples = []; // the clock was set back
    }
    this._samples.push({
      at: now.at,
      memory: part(now.memory_bytes, now.limit_bytes),
      use: before === undefined ? undefined : use(before, now)
    });
    this._before = now;
    this._samples = this._samples.filter(sample => sample.at > now.at - this.span);
  }

  private _before: IFigures | undefined;
  private _samples: ISample[] = [];
}

/** Return the part of the time between two answers in which the session's GPUs computed for it. */
function use(before: IFigures, now: IFigures): number | undefined {
  if (before.gpu_seconds === null || now.gpu_seconds === null || now.gpu_seconds < before.gpu_seconds) {
    return undefined; // an agent that does not say, or a session that was opened anew
  }
  return part(now.gpu_seconds - before.gpu_seconds, (now.at - before.at) * Math.max(1, now.gpus.length));
}

function part(amount: number, total: number): number {
  return total > 0 ? Math.min(1, Math.max(0, amount / total)) : 0;
}

/** Return an SVG path through the known values, with a gap where one is unknown. The newest value is at the right. */
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
