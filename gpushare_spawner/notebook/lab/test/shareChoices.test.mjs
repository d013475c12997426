// Run by tests/notebook/test_lab_units.py, on what tsc made of src.
import assert from 'node:assert/strict';
import test from 'node:test';

import { adviceOf, isFree, ownChoice, preselected, ShareChoices } from '../lib/shareChoices.js';
import { shareChoice } from '../lib/words.js';

function asking(...answers) {
  const asked = { count: 0, now: 0 };
  const choices = new ShareChoices(
    async kind => {
      assert.equal(kind, 'shares');
      return answers[asked.count++];
    },
    () => asked.now
  );
  return { asked, choices };
}

function own(units, largest, gpus = 1, last = 0) {
  return { share_units: units, last_units: last, largest_share_units: largest, gpus: Array(gpus).fill({}) };
}

test('the service is asked again after five minutes, or for another share', async () => {
  const { asked, choices } = asking(
    { done: true, text: '[10, 50]' },
    { done: true, text: '[10]' },
    { done: true, text: '[25]' }
  );
  assert.deepEqual(await choices.of(25), { units: [10, 50], text: '' });
  asked.now = 299_000;
  assert.deepEqual(await choices.of(25), { units: [10, 50], text: '' });
  assert.equal(asked.count, 1);
  asked.now = 300_000;
  assert.deepEqual(await choices.of(25), { units: [10], text: '' });
  assert.deepEqual(await choices.of(50), { units: [25], text: '' });
});

test('a refusal is shown, and the service is asked again after 15 seconds', async () => {
  const { asked, choices } = asking({ done: false, text: 'The agent is old.' }, { done: true, text: '[50]' });
  assert.deepEqual(await choices.of(25), { units: [], text: 'The agent is old.' });
  asked.now = 14_000;
  assert.deepEqual(await choices.of(25), { units: [], text: 'The agent is old.' });
  assert.equal(asked.count, 1);
  asked.now = 15_000;
  assert.deepEqual(await choices.of(25), { units: [50], text: '' });
});

test('many who want the list while its answer is under way ask once', async () => {
  const { asked, choices } = asking({ done: true, text: '[50]' });
  const got = await Promise.all([choices.of(25), choices.of(25), choices.of(25)]);
  assert.equal(asked.count, 1);
  assert.equal(new Set(got).size, 1);
});

test('the next larger share that is free is chosen for the user, or none', () => {
  assert.equal(preselected([10, 50, 100], own(25, 75)), 50);
  assert.equal(preselected([10, 50, 100], own(25, 40)), undefined);
  assert.equal(preselected([10], own(25, 100)), undefined);
  assert.equal(preselected([50, 100], own(25, 25)), undefined);
});

test('shares of several GPUs are compared by all their units', () => {
  const choices = [50, 150, 100]; // half of each of two GPUs, one and a half, two
  const text = (choice, of) => shareChoice(choice, 2, isFree(choice, of)).replaceAll('\u00a0', ' ');
  const halves = own(50, 75, 2);
  assert.deepEqual([ownChoice(halves), preselected(choices, halves)], [50, undefined]);
  assert.deepEqual(
    choices.map(choice => text(choice, halves)),
    ['2 × 0.50 GPU', '1.50 GPU (not free now)', '2 GPUs (not free now)']
  );
  assert.equal(preselected(choices, own(50, 100, 2)), 150);
  // beside a whole GPU only the last one can lack units
  const more = own(100, 75, 2, 20);
  assert.deepEqual([ownChoice(more), preselected(choices, more)], [120, 150]);
  assert.deepEqual(
    choices.map(choice => text(choice, more)),
    ['2 × 0.50 GPU', '1.50 GPU', '2 GPUs (not free now)']
  );
  assert.equal(preselected(choices, own(100, 100, 2)), undefined);
  assert.equal(shareChoice(250, 3, true), '2.50\u00a0GPU');
});

test('an answer that is no list of units gives no choices', async () => {
  for (const text of ['It was done.', '{"a": 1}', '["50", -1, 0.5]']) {
    const { choices } = asking({ done: true, text });
    assert.deepEqual((await choices.of(25)).units, []);
  }
});

test('advice is JSON of units and a sentence, and anything else is none', () => {
  const text = JSON.stringify({ units: 25, text: '0.25 GPU would have been enough.' });
  assert.deepEqual(adviceOf({ done: true, text }), { units: 25, text: '0.25 GPU would have been enough.' });
  for (const other of ['null', '[]', '{"units": "25", "text": ""}', '{"units": 0, "text": ""}', '{"units": 25}', 'No.']) {
    assert.equal(adviceOf({ done: true, text: other }), undefined);
  }
  assert.equal(adviceOf({ done: false, text }), undefined, 'an older agent refuses the request');
});
