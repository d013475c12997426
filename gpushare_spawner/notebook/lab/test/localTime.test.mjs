// Run by tests/notebook/test_lab_units.py in the time zone Europe/Berlin, on what tsc made of src.
import assert from 'node:assert/strict';
import test from 'node:test';

import { atLocalTime, clock, secondsUntil } from '../lib/localTime.js';

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
