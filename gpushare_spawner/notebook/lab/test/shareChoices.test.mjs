// Run by tests/notebook/test_lab_units.py, on what tsc made of src.
import assert from 'node:assert/strict';
import test from 'node:test';

import { ShareChoices } from '../lib/shareChoices.js';

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

test('a refusal is shown, and not kept', async () => {
  const { choices } = asking({ done: false, text: 'The agent is old.' }, { done: true, text: '[50]' });
  assert.deepEqual(await choices.of(25), { units: [], text: 'The agent is old.' });
  assert.deepEqual(await choices.of(25), { units: [50], text: '' });
});

test('an answer that is no list of units gives no choices', async () => {
  for (const text of ['It was done.', '{"a": 1}', '["50", -1, 0.5]']) {
    const { choices } = asking({ done: true, text });
    assert.deepEqual((await choices.of(25)).units, []);
  }
});
