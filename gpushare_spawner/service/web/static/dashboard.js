// Keeps the dashboard current: fetches the page again and replaces <main>.
"use strict";

const EVERY_MS = 5000;
const freshness = document.getElementById("freshness");
let last = new Date();

/* On 24 hours, with the day if it is not today. */
function clock(at) {
  const time = at.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
  if (at.toDateString() === new Date().toDateString()) return time;
  return `${time} on ${at.getDate()} ${at.toLocaleDateString("en-US", { month: "short" })}`;
}

function say(text, stale) {
  freshness.textContent = text;
  freshness.classList.toggle("stale", stale);
}

async function refresh() {
  if (document.hidden) return;
  try {
    const answer = await fetch(location.href, {
      cache: "no-store",
      redirect: "manual",
      headers: { "X-XSRFToken": document.body.dataset.xsrf },
    });
    if (answer.type === "opaqueredirect") {
      location.reload(); // the user is logged out: the hub shows the login page
      return;
    }
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const fresh = page.getElementById("dashboard");
    if (!fresh) throw new Error("the answer is not a dashboard");
    const shown = document.getElementById("dashboard");
    if (fresh.innerHTML !== shown.innerHTML) shown.replaceChildren(...fresh.childNodes);
    last = new Date();
    say(`As of ${clock(last)}`, false);
  } catch (error) {
    say(`Not refreshed since ${clock(last)}: ${error.message}`, true);
  }
}

say(`As of ${clock(last)}`, false);
setInterval(refresh, EVERY_MS);
document.addEventListener("visibilitychange", refresh);
