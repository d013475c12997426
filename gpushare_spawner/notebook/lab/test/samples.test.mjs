// Run by tests/notebook/test_lab_units.py, on what tsc made of src.
import assert from 'node:assert/strict';
import test from 'node:test';

import { Samples, linePath } from '../lib/samples.js';

const figures = (at, gpuSeconds, more = {}) => ({
  at,
  gpu_seconds: gpuSeconds,
  gpus: ['one'],
  memory_bytes: 4,
  limit_bytes: 16,
  ...more
});

function samplesOf(...all) {
  const samples = new Samples(300);
  all.forEach(one => samples.add(one));
  return samples;
}

const uses = samples => samples.all.map(sample => sample.use);

test('the use is the GPU time of the time that passed, on all GPUs', () => {
  assert.deepEqual(uses(samplesOf(figures(100, 7), figures(105, 8), figures(110, 13))), [undefined, 0.2, 1]);
  const two = { gpus: ['one', 'two'] };
  assert.deepEqual(uses(samplesOf(figures(100, 7, two), figures(110, 17, two))), [undefined, 0.5]);
});

test('more GPU time than time is all of it', () => {
  assert.deepEqual(uses(samplesOf(figures(100, 7), figures(101, 9))), [undefined, 1]);
});

test('the use is unknown where the agent does not say, and after a session was opened anew', () => {
  assert.deepEqual(uses(samplesOf(figures(100, null), figures(105, null))), [undefined, undefined]);
  assert.deepEqual(uses(samplesOf(figures(100, 7), figures(105, 1), figures(110, 2))), [undefined, undefined, 0.2]);
});

test('memory is a part of the limit, and 0 without a limit', () => {
  assert.equal(samplesOf(figures(100, 0)).last.memory, 0.25);
  assert.equal(samplesOf(figures(100, 0, { memory_bytes: 20 })).last.memory, 1);
  assert.equal(samplesOf(figures(100, 0, { limit_bytes: 0 })).last.memory, 0);
});

test('the same answer counts once, and only the last minutes are kept', () => {
  assert.equal(samplesOf(figures(100, 7), figures(100, 7)).all.length, 1);
  const many = Array.from({ length: 1000 }, (_, at) => figures(at, 0));
  assert.equal(samplesOf(...many).all.length, 300);
});

test('a clock that was set back begins anew', () => {
  const samples = samplesOf(figures(1000, 7), figures(1005, 8), figures(10, 9), figures(15, 10));
  assert.deepEqual(
    samples.all.map(sample => sample.at),
    [10, 15]
  );
  assert.equal(samples.last.use, 0.2);
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
