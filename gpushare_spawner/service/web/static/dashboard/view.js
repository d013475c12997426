// Shows the page of the current address, and keeps it current.

import { LoggedOut, RequestFailed, request } from "./api.js";
import { Events } from "./events.js";
import { join } from "./join.js";

const WHEN_LIVE_MS = 15_000; // idle times and remaining times grow without an event
const ELSE_MS = 5_000;
const LEAST_GAP_MS = 3_000; // where something changes all the time

const freshness = document.getElementById("freshness");
const announced = document.getElementById("announced");
let last = new Date();
let problem = "";
let loggedOut = false;
let live = false;
let running = null; // the refresh that runs
let again = false; // something changed meanwhile
let timer = 0;
let due = Infinity; // when the next refresh begins

const { clock, inFull, show: showTimes } = globalThis.gpushareTimes;

/* A link to this page: the service leads to the hub's login, which leads back. */
function logIn() {
  const link = document.createElement("a");
  link.href = location.href;
  link.textContent = "Log in";
  return link;
}

function tell() {
  const state = loggedOut ? "out" : problem ? "stale" : live ? "live" : "slow";
  freshness.textContent = {
    out: `You are logged out. This page is from ${clock(last)}. `,
    stale: `Not refreshed since ${clock(last)}: ${problem}`,
    live: `Live, as of ${clock(last)}`,
    slow: `Not live: refreshed every ${ELSE_MS / 1000} seconds, as of ${clock(last)}`,
  }[state];
  if (loggedOut) freshness.append(logIn());
  freshness.title = inFull(last);
  // a screen reader hears of a new state, and not of each minute
  if (freshness.dataset.state && freshness.dataset.state !== state) announced.textContent = freshness.textContent;
  freshness.dataset.state = state;
}

/* Refreshes after so many milliseconds, or sooner where that is planned already. */
function plan(delay) {
  const at = Date.now() + delay;
  if (at >= due) return;
  due = at;
  clearTimeout(timer);
  timer = setTimeout(refresh, delay);
}

function unplan() {
  due = Infinity;
  clearTimeout(timer);
}

async function load() {
  const address = location.href;
  const answer = await request(address);
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  if (address !== location.href) {
    again = true; // the user has moved on
    return;
  }
  const fresh = page.getElementById("dashboard");
  if (!fresh) throw new RequestFailed("The answer is not a dashboard.");
  document.body.dataset.xsrf = page.body.dataset.xsrf;
  showTimes(fresh);
  join(document.getElementById("dashboard"), fresh);
  document.dispatchEvent(new Event("shown"));
}

/* Fetches the page again. Requests that come while one runs are one more request after it. */
export function refresh() {
  again = running !== null;
  running ??= (async () => {
    do {
      again = false;
      unplan(); // what changes from here on is planned anew
      try {
        await load();
        last = new Date();
        problem = "";
        loggedOut = false;
      } catch (error) {
        problem = error.message;
        loggedOut = error instanceof LoggedOut;
      }
      tell();
    } while (again);
    running = null;
    plan(live ? WHEN_LIVE_MS : ELSE_MS);
  })();
  return running;
}

/* Moves to another address of the dashboard. `replace`: the browser's history gets no entry. */
export function show(address, replace = false) {
  if (replace) history.replaceState(null, "", address);
  else history.pushState(null, "", address);
  return refresh();
}

export function start() {
  const events = new Events(
    `${document.body.dataset.prefix}api/v1/events`,
    () => plan(Math.max(0, LEAST_GAP_MS - (new Date() - last))),
    (connected) => {
      live = connected;
      tell();
      plan(live ? 0 : ELSE_MS); // something may have changed while there was no connection
    },
  );
  const follow = () => {
    if (document.hidden) {
      events.stop();
      unplan();
    } else {
      events.start();
      refresh();
    }
  };
  document.addEventListener("visibilitychange", follow);
  addEventListener("popstate", refresh);
  tell();
  plan(ELSE_MS);
  if (!document.hidden) events.start();
}
