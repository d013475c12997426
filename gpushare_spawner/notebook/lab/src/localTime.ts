/** Instants and times of day, as the reader's own clock shows them. */

/** Like `near_clock` in gpushare_spawner/wording/amounts.py. */
const SOON_SECONDS = 120;

/** Return an instant in 24-hour format, with its day if that is not today. `at`: seconds since the epoch. */
export function clock(at: number, now: Date = new Date(), withSeconds = false): string {
  const instant = new Date(at * 1000);
  const second = withSeconds ? '2-digit' : undefined;
  const time = instant.toLocaleTimeString([], { hour: '2-digit', minute: '2-digit', second, hourCycle: 'h23' });
  if (instant.toDateString() === now.toDateString()) {
    return time;
  }
  return `${time} on ${instant.getDate()} ${instant.toLocaleDateString('en-US', { month: 'short' })}`;
}

/** Insert an instant for the server's `{time}`, because only the browser knows the reader's time zone. */
export function atLocalTime(text: string, at: number | null | undefined, now: Date = new Date()): string {
  return localised(text, now)
    .split('{time}')
    .join(at ? clock(at, now, isSoon(at, now)) : '');
}

const INSTANT = /\b(\d{4}-\d\d-\d\d)[ \u00a0](\d\d:\d\d)[ \u00a0]UTC\b/g;

/** Show a text's instants, which the server formats with `utc` of wording/amounts.py, in local time. */
export function localised(text: string, now: Date = new Date()): string {
  return text.replace(INSTANT, (said, day, time) => {
    const at = Date.parse(`${day}T${time}Z`);
    return Number.isNaN(at) ? said : clock(at / 1000, now);
  });
}

/** Return an instant in full, with the time zone, for a tooltip. `at`: seconds since the epoch. */
export function inFull(at: number): string {
  const instant = new Date(at * 1000);
  const time = instant.toLocaleTimeString([], { hour: '2-digit', minute: '2-digit', hourCycle: 'h23' });
  const day = `${instant.getDate()} ${instant.toLocaleDateString('en-US', { month: 'short' })} ${instant.getFullYear()}`;
  const parts = new Intl.DateTimeFormat('en-GB', { timeZoneName: 'short' }).formatToParts(instant);
  const zone = parts.find(part => part.type === 'timeZoneName')?.value ?? '';
  const place = new Intl.DateTimeFormat().resolvedOptions().timeZone;
  return `${day}, ${time} ${zone}${place && place !== zone ? ` (${place})` : ''}`;
}

/** Return the instants of a text in full. `at`: the instant for `{time}`. */
export function instantsInFull(text: string, at?: number | null): string {
  const found = [...text.matchAll(INSTANT)].map(([, day, time]) => Date.parse(`${day}T${time}Z`) / 1000);
  const all = at && text.includes('{time}') ? [at, ...found] : found;
  return all
    .filter(instant => !Number.isNaN(instant))
    .map(inFull)
    .join('; ');
}

/** Return whether an instant is so near that its minute would not show how much time is left. */
function isSoon(at: number, now: Date): boolean {
  return Math.abs(at - now.getTime() / 1000) < SOON_SECONDS;
}

/** Return the seconds until the next occurrence of a time of day ("18:30"); undefined for other text. */
export function secondsUntil(timeOfDay: string, now: Date = new Date()): number | undefined {
  const parts = /^([01]\d|2[0-3]):([0-5]\d)$/.exec(timeOfDay);
  if (parts === null) {
    return undefined;
  }
  const then = new Date(now);
  then.setHours(Number(parts[1]), Number(parts[2]), 0, 0);
  if (then <= now) {
    then.setDate(then.getDate() + 1);
  }
  return Math.ceil((then.getTime() - now.getTime()) / 1000);
}
