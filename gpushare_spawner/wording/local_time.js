// Shows the instants of a page in the reader's time zone, with the zone on hover. The dashboard, the history and the
// hub's page of a pending spawn run this one script; notebook/lab/src/localTime.ts does the same in JupyterLab.
//
// The server writes an instant as `utc` of amounts.py does: "2026-11-03 14:05 UTC", in any text of a page and in any
// tooltip. Events of Kubernetes begin with "2026-11-03T14:05:20Z". What has its own element: <time datetime="...">.
"use strict";
(() => {
  const INSTANT = /\b(\d{4}-\d\d-\d\d)(?:[ \u00a0](\d\d:\d\d(?::\d\d)?)[ \u00a0]UTC\b|T(\d\d:\d\d:\d\d)(?:\.\d+)?Z)/g;
  const TEXT_ONLY = "title, desc, text, option, textarea, script, style, svg *"; // no element can stand in these

  /* On 24 hours, with its day if that is not today. */
  function clock(at, seconds = false, now = new Date()) {
    const second = seconds ? "2-digit" : undefined;
    const time = at.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second, hourCycle: "h23" });
    if (at.toDateString() === now.toDateString()) return time;
    return `${time} on ${day(at)}`;
  }

  function day(at) {
    return `${at.getDate()} ${at.toLocaleDateString("en-US", { month: "short" })}`;
  }

  /* Like "CET". */
  function zone(at) {
    const parts = new Intl.DateTimeFormat("en-GB", { timeZoneName: "short" }).formatToParts(at);
    return parts.find((part) => part.type === "timeZoneName").value;
  }

  /* In full, with the time zone: "3 Nov 2026, 15:05 CET (Europe/Berlin)". */
  function inFull(at) {
    const time = at.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
    const place = new Intl.DateTimeFormat().resolvedOptions().timeZone;
    return `${day(at)} ${at.getFullYear()}, ${time} ${zone(at)}${place && place !== zone(at) ? ` (${place})` : ""}`;
  }

  function instantOf(found) {
    return new Date(`${found[1]}T${found[2] ?? found[3]}Z`);
  }

  function shown(found) {
    return clock(instantOf(found), (found[2] ?? found[3]).length > 5);
  }

  function timeOf(at, text) {
    const time = document.createElement("time");
    time.dateTime = at.toISOString();
    time.title = inFull(at);
    time.textContent = text;
    return time;
  }

  function withZone(text) {
    return text.replace(INSTANT, (...found) => {
      const at = instantOf(found);
      return Number.isNaN(at.getTime()) ? found[0] : `${shown(found)} ${zone(at)}`;
    });
  }

  function showText(node) {
    if (node.parentElement.closest(TEXT_ONLY)) {
      const text = withZone(node.data);
      if (text !== node.data && !node.parentElement.closest("script, style, textarea")) node.data = text;
      return;
    }
    const parts = [];
    let end = 0;
    for (const found of node.data.matchAll(INSTANT)) {
      const at = instantOf(found);
      if (Number.isNaN(at.getTime())) continue;
      parts.push(node.data.slice(end, found.index), timeOf(at, shown(found)));
      end = found.index + found[0].length;
    }
    if (parts.length) node.replaceWith(...parts, node.data.slice(end));
  }

  /* Shows all instants in an element, or in a document. What is shown already stays. */
  function show(root) {
    for (const time of root.querySelectorAll("time[datetime]:not([title])")) {
      const at = new Date(time.dateTime);
      if (!Number.isNaN(at.getTime())) time.replaceChildren(clock(at)), (time.title = inFull(at));
    }
    // the axis of a plot: an hour or a day alone
    for (const mark of root.querySelectorAll("[data-hour], [data-day]")) {
      const at = new Date(mark.dataset.hour ?? mark.dataset.day);
      mark.textContent = mark.dataset.day ? day(at) : clock(at).slice(0, 5);
    }
    for (const element of root.querySelectorAll("[title], [aria-label]")) {
      for (const name of ["title", "aria-label"]) {
        const text = element.getAttribute(name);
        if (text && text.search(INSTANT) >= 0) element.setAttribute(name, withZone(text));
      }
    }
    const texts = [];
    const walker = document.createTreeWalker(root.body ?? root, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) if (walker.currentNode.data.search(INSTANT) >= 0) texts.push(walker.currentNode);
    texts.forEach(showText);
  }

  globalThis.gpushareTimes = { clock, inFull, show };
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", () => show(document));
  else show(document);
})();
