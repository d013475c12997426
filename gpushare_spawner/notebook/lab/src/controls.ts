/** The user's requests to the service, from the dialog, a notification or the command palette. */

import { AskKind, IAskAnswer } from './status';

/** Hours that the dialog offers. The service checks the template's limits and explains a refusal. */
export const KEEP_HOURS = [1, 4, 8] as const;
/** Hours of a keep that a click in a notification requests. */
export const KEEP_AT_ONCE_HOURS = 4;
export const HOUR = 3600;

export interface IControls {
  /** Ask, and show the new status soon. `value`: seconds of a keep, units of a share, else 0. Throws nothing. */
  ask(kind: AskKind, value?: number): Promise<IAskAnswer>;
  /** Open the dialog. */
  open(): void;
}
