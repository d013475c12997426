// Follows the service's server-sent events. Not with EventSource: that can send no header, and does not say why it fails.

import { request } from "./api.js";

const SILENT_MS = 40_000; // the service sends something at least every 15 s
const FIRST_PAUSE_MS = 1_000;
const LONGEST_PAUSE_MS = 30_000;

/* Yields [event, data] of each event in a stream of text. */
async function* eventsIn(stream, alive) {
  let text = "";
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    alive();
    text += value.replaceAll("\r", "");
    const blocks = text.split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const fields = { event: "message", data: "" };
      for (const line of block.split("\n")) {
        const [, name, content] = /^(\w*):? ?(.*)$/.exec(line) ?? [];
        if (name in fields) fields[name] = content;
      }
      if (fields.data) yield [fields.event, fields.data];
    }
  }
}

/* Calls `changed(parts)` for each change, and `live(true or false)` when the connection begins and ends. */
export class Events {
  #address;
  #changed;
  #live;
  #connection = null; // an AbortController while it should run

  constructor(address, changed, live) {
    this.#address = address;
    this.#changed = changed;
    this.#live = live;
  }

  start() {
    if (this.#connection) return;
    this.#connection = new AbortController();
    this.#run(this.#connection.signal);
  }

  stop() {
    this.#connection?.abort();
    this.#connection = null;
  }

  async #run(stopped) {
    let pause = FIRST_PAUSE_MS;
    while (!stopped.aborted) {
      const began = Date.now();
      try {
        await this.#follow(stopped);
      } catch {
        // the page says that it is not live; the next request for data says why
      }
      if (stopped.aborted) return;
      this.#live(false);
      if (Date.now() - began > LONGEST_PAUSE_MS) pause = FIRST_PAUSE_MS;
      await new Promise((resolve) => setTimeout(resolve, pause * (0.5 + Math.random())));
      pause = Math.min(2 * pause, LONGEST_PAUSE_MS);
    }
  }

  async #follow(stopped) {
    const silent = new AbortController();
    let timer = 0;
    const alive = () => {
      clearTimeout(timer);
      timer = setTimeout(() => silent.abort(), SILENT_MS);
    };
    try {
      alive();
      const answer = await request(this.#address, {
        headers: { Accept: "text/event-stream" },
        signal: AbortSignal.any([stopped, silent.signal]),
      });
      this.#live(true);
      for await (const [event, data] of eventsIn(answer.body, alive)) {
        if (event === "changed") this.#changed(JSON.parse(data).parts ?? []);
      }
    } finally {
      clearTimeout(timer);
    }
  }
}
