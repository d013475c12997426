/**
 * The labels of the extension's buttons and parts. Sentences about the share come from the server, which has them in
 * gpushare_spawner/wording.
 */

export const TITLE = 'GPU share';
export const UNKNOWN = 'GPU share: unknown';
export const SERVER_UNAVAILABLE = 'The notebook server is unavailable.';

export const DASHBOARD = 'Dashboard';
export const DETAILS = 'Details';
export const CLOSE = 'Close';

export const MESSAGE = 'Message from an admin';
export const WHY_SLOW = 'Why is it slow?';
export const KEEP = 'Keep the share';
export const KEEP_UNTIL_BUTTON = 'Keep until';
export const KEEP_COMMAND = 'Keep the GPU share for 4\u00a0h';
export const RELEASE_COMMAND = 'Release the GPU share now';
export const END = 'Release or stop';
export const KEEP_UNTIL_LABEL = 'Keep the share until this time of day';
export const END_KEEP = 'End the keep';
export const RELEASE = 'Release now';
export const RELEASED_ALREADY = 'The share is released already.';
export const STOP = 'Stop my server';
export const STOP_WARNING = 'The server and its kernels end, and their variables are lost. Save your work first.';
export const STOP_CONFIRM = 'Stop it';
export const CANCEL = 'Cancel';
export const CHANGE_SHARE = 'Change the share';
export const NEW_SHARE = 'New share';
export const CHANGE = 'Change';
export const ASKING = 'Waiting for the answer…';
export const PERHAPS_STOPPED =
  'The notebook server no longer answers: it has probably stopped. Reload this page to start it again.';
export const NO_ANSWER = 'The notebook server did not answer. Try again.';

export function keepHours(hours: number): string {
  return `Keep ${hours}\u00a0h`;
}

export function kept(time: string): string {
  return `kept until ${time}`;
}

/** A share that the user may have: units on each of its GPUs; 150 is a whole GPU and half of another. */
export function shareChoice(choice: number, gpus: number, isFree: boolean): string {
  const units = choice === 100 ? choice * gpus : choice;
  const number = units % 100 ? (units / 100).toFixed(2) : units / 100;
  const each = choice < 100 && gpus > 1 ? `${gpus} × ` : '';
  return `${each}${number}\u00a0GPU${units > 100 && !(units % 100) ? 's' : ''}${isFree ? '' : ' (not free now)'}`;
}

export function changeTo(units: number): string {
  return `Change to ${shareChoice(units, 1, true)}`;
}

/** Text for users who cannot see the plot. */
export function plotted(minutes: number, memory: number, use: number | undefined): string {
  const said = use === undefined ? '' : `, use ${percent(use)}`;
  return `GPU memory and use over the last ${minutes} minutes; now: memory ${percent(memory)} of the limit${said}`;
}

export function percent(part: number): string {
  return `${Math.round(part * 100)}\u00a0%`;
}
