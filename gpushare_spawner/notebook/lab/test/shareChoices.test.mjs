// Run by tests/notebook/test_lab_units.py, on what tsc made of src.
import assert from 'node:assert/strict';
import test from 'node:test';

import { preselected, ShareChoices } from '../lib/shareChoices.js';

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
  assert.equal(preselected([10, 50, 100], 25, 75), 50);
  assert.equal(preselected([10, 50, 100], 25, 40), undefined);
  assert.equal(preselected([10], 25, 100), undefined);
  assert.equal(preselected([50, 100], 25, 25), undefined);
});

test('an answer that is no list of units gives no choices', async () => {
  for (const text of ['It was done.', '{"a": 1}', '["50", -1, 0.5]']) {
    const { choices } = asking({ done: true, text });
    assert.deepEqual((await choices.of(25)).units, []);
  }
});
