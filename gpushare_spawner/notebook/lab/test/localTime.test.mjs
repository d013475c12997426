// Run by tests/notebook/test_lab_units.py in the time zone Europe/Berlin, on what tsc made of src.
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import test from 'node:test';

import { atLocalTime, clock, inFull, instantsInFull, localised, secondsUntil } from '../lib/localTime.js';

const seconds = text => new Date(text).getTime() / 1000;
const NOW = new Date('2026-03-28T22:30:00');

test('an instant of today has no day, another one has', () => {
  assert.equal(clock(seconds('2026-03-28T23:05:59'), NOW), '23:05');
  assert.equal(clock(seconds('2026-03-29T00:05:00'), NOW), '00:05 on 29 Mar');
});

test('an instant stands where the server wrote {time}', () => {
  const at = seconds('2026-03-28T23:05:00');
  assert.equal(atLocalTime('At {time}, or $& {time}.', at, NOW), 'At 23:05, or $& 23:05.');
  assert.equal(atLocalTime('no instant', null, NOW), 'no instant');
});

test('an instant within two minutes has its seconds', () => {
  assert.equal(atLocalTime('At {time}.', seconds('2026-03-28T22:31:59'), NOW), 'At 22:31:59.');
  assert.equal(atLocalTime('At {time}.', seconds('2026-03-28T22:28:01'), NOW), 'At 22:28:01.');
  assert.equal(atLocalTime('At {time}.', seconds('2026-03-28T22:32:00'), NOW), 'At 22:32.');
});

test('a time of day is the next one that comes', () => {
  assert.equal(secondsUntil('22:31', NOW), 60);
  assert.equal(secondsUntil('22:30', new Date('2026-03-26T22:30:00')), 86400);
  assert.equal(secondsUntil('22:29', new Date('2026-03-26T22:30:59.5')), 86400 - 119);
});

test('the night in which clocks change has 23 hours', () => {
  assert.equal(secondsUntil('22:30', NOW), 23 * 3600);
});

test('another text is no time of day', () => {
  for (const text of ['', '7:00', '24:00', '12:60', '12:00:00', 'noon']) {
    assert.equal(secondsUntil(text, NOW), undefined);
  }
});

test('the instants of a text are shown in local time, and in full on hover', () => {
  const text = 'Stopped at 2026-03-28 22:05 UTC, in winter; at 2026-03-29\u00a022:05\u00a0UTC in summer.';
  assert.equal(localised(text, NOW), 'Stopped at 23:05, in winter; at 00:05 on 30 Mar in summer.');
  assert.equal(
    atLocalTime(`{time}. ${text}`, seconds('2026-03-28T22:40:00'), NOW).slice(0, 22),
    '22:40. Stopped at 23:0'
  );
  assert.equal(instantsInFull(text), '28 Mar 2026, 23:05 CET (Europe/Berlin); 30 Mar 2026, 00:05 CEST (Europe/Berlin)');
  assert.equal(instantsInFull('At {time}.', seconds('2026-03-28T22:40:00')), '28 Mar 2026, 22:40 CET (Europe/Berlin)');
  assert.equal(localised('Not one: 2026-03-28 22:05.', NOW), 'Not one: 2026-03-28 22:05.');
  assert.equal(localised('Nor this: 2026-13-41 22:05 UTC.', NOW), 'Nor this: 2026-13-41 22:05 UTC.');
  assert.equal(instantsInFull('Nor this: 2026-13-41 22:05 UTC, {time}.', null), '');
});

test('the script of the web pages shows an instant as JupyterLab does', () => {
  const script = readFileSync(new URL('../../../wording/local_time.js', import.meta.url), 'utf8');
  const page = { readyState: 'loading', addEventListener: () => undefined };
  const { clock: ofPages, inFull: inFullOfPages } = new Function(
    'document',
    `const globalThis = {}; ${script.replace('"use strict";', '')}; return globalThis.gpushareTimes;`
  )(page);
  for (const text of ['2026-03-28T22:32:00', '2026-03-29T00:10:05', '2027-01-01T12:00:00', '2025-07-01T23:59:59']) {
    assert.equal(ofPages(new Date(text), false, NOW), clock(seconds(text), NOW));
    assert.equal(inFullOfPages(new Date(text)), inFull(seconds(text)));
  }
});
