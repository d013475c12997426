// Run by tests/notebook/test_lab_units.py, on what tsc made of src.
import assert from 'node:assert/strict';
import test from 'node:test';

import { Samples, linePath } from '../lib/samples.js';

const figures = (at, uses, more = {}) => ({
  at,
  gpus: uses.map(utilisation => ({ utilisation })),
  memory_bytes: 4,
  limit_bytes: 16,
  ...more
});

function samplesOf(...all) {
  const samples = new Samples(300);
  all.forEach(one => samples.add(one));
  return samples;
}

test('the use is the mean of the GPUs', () => {
  assert.equal(samplesOf(figures(100, [0.25])).last.use, 0.25);
  assert.equal(samplesOf(figures(100, [0.25, 0.75])).last.use, 0.5);
});

test('the use is unknown where the agent does not say', () => {
  assert.equal(samplesOf(figures(100, [null])).last.use, undefined);
  assert.equal(samplesOf(figures(100, [])).last.use, undefined);
});

test('memory is a part of the limit, and 0 without a limit', () => {
  assert.equal(samplesOf(figures(100, [0])).last.memory, 0.25);
  assert.equal(samplesOf(figures(100, [0], { memory_bytes: 20 })).last.memory, 1);
  assert.equal(samplesOf(figures(100, [0], { limit_bytes: 0 })).last.memory, 0);
});

test('the same answer counts once, and only the last minutes are kept', () => {
  assert.equal(samplesOf(figures(100, [0]), figures(100, [0])).all.length, 1);
  const many = Array.from({ length: 1000 }, (_, at) => figures(at, [0]));
  assert.equal(samplesOf(...many).all.length, 300);
});

test('a clock that was set back begins anew', () => {
  const samples = samplesOf(figures(1000, [0]), figures(1005, [0]), figures(10, [0]), figures(15, [0.5]));
  assert.deepEqual(
    samples.all.map(sample => sample.at),
    [10, 15]
  );
  assert.equal(samples.last.use, 0.5);
});

test('the line ends at the right edge, and has a gap where a value is unknown', () => {
  const line = samples => linePath(samples, sample => sample.use, 100, 50, 10);
  assert.equal(line([]), '');
  assert.equal(
    line([
      { at: 0, use: 0 },
      { at: 50, use: 1 },
      { at: 75, use: undefined },
      { at: 100, use: 0.5 }
    ]),
    'M0.0 10.0L25.0 0.0M50.0 5.0'
  );
});
