// The dialogs with the actions on a session, a GPU or node, or a spawn. Each form of a dialog is one request to the
// REST API: data-method, data-path below the target's address, and its fields as JSON.

import { call } from "./api.js";
import { refresh } from "./view.js";

let opener = null; // the button whose dialog is open
let running = false;

const confirmation = document.getElementById("confirm-dialog");

function dialogOf(button) {
  return document.getElementById(`${button.dataset.dialog}-dialog`);
}

/* Shows what can be done now; what the user has typed stays. */
function show(dialog, target) {
  for (const place of dialog.querySelectorAll("[data-show]")) place.textContent = target.show[place.dataset.show] ?? "";
  globalThis.gpushareTimes.show(dialog);
  for (const form of dialog.querySelectorAll("form[data-action]")) form.hidden = !target.may.includes(form.dataset.action);
  const choices = { ...JSON.parse(document.getElementById("dashboard").dataset.choices), ...target.choices };
  for (const list of dialog.querySelectorAll("select[data-choices]")) fill(list, choices[list.dataset.choices]);
}

function fill(list, choices) {
  const wanted = JSON.stringify(choices);
  if (list.dataset.filled === wanted) return;
  list.dataset.filled = wanted;
  const before = list.value;
  list.replaceChildren(...choices.map(([value, text]) => new Option(text, value)));
  if (choices.some(([value]) => value === before)) list.value = before;
}

function answer(dialog, text, kind = "") {
  const place = dialog.querySelector(".answer");
  place.textContent = text;
  globalThis.gpushareTimes.show(place);
  place.dataset.kind = kind;
}

function open(button) {
  const dialog = dialogOf(button);
  opener = button;
  for (const form of dialog.querySelectorAll("form")) form.reset();
  answer(dialog, "");
  const target = JSON.parse(button.dataset.target);
  show(dialog, target);
  for (const list of dialog.querySelectorAll("select[data-choices]")) {
    const now = target.chosen?.[list.dataset.choices];
    // nothing is chosen before the user does: the first could be what cannot be had now
    if (now === "") list.selectedIndex = -1;
    else if ([...list.options].some((option) => option.value === now)) list.value = now;
  }
  dialog.showModal();
}

/* The page has been refreshed: the target may have changed, or be gone. */
function follow() {
  if (!opener) return;
  const dialog = dialogOf(opener);
  if (opener.isConnected) show(dialog, JSON.parse(opener.dataset.target));
  else {
    for (const form of dialog.querySelectorAll("form[data-action]")) form.hidden = true;
    if (!running && !dialog.querySelector(".answer").textContent) answer(dialog, dialog.dataset.gone);
  }
}

function confirmed(question, label) {
  confirmation.querySelector("#confirm-text").textContent = question;
  confirmation.querySelector("[value=yes]").textContent = label;
  confirmation.returnValue = "";
  confirmation.showModal();
  return new Promise((resolve) => {
    confirmation.addEventListener("close", () => resolve(confirmation.returnValue === "yes"), { once: true });
  });
}

/* The form's fields by their names, as the API wants them; empty ones are left out. */
function dataOf(form) {
  const data = {};
  for (const field of form.elements) {
    if (!field.name || field.value === "") continue;
    data[field.name] = {
      number: () => Number(field.value) * Number(field.dataset.times ?? 1),
      instant: () => new Date(field.value).getTime() / 1000,
    }[field.dataset.type]?.() ?? field.value;
  }
  return data;
}

async function run(form, button) {
  const dialog = form.closest("dialog");
  const { address, show: shown } = JSON.parse(opener.dataset.target);
  const question = form.dataset.confirm?.replace("{name}", shown.name);
  if (question && !(await confirmed(question, button.textContent))) return;
  running = true;
  const buttons = [...dialog.querySelectorAll("button")];
  for (const one of buttons) one.disabled = true;
  dialog.setAttribute("aria-busy", "true");
  answer(dialog, "Please wait.");
  try {
    let path = form.dataset.path ? `${address}/${form.dataset.path}` : address;
    const data = dataOf(form);
    const nobody = "nobody" in form.dataset;
    // without a body the fields are in the address
    if (nobody && Object.keys(data).length) path += `?${new URLSearchParams(data)}`;
    const { message } = await call(form.dataset.method, path, nobody ? undefined : data);
    answer(dialog, message, "done");
    await refresh();
  } catch (error) {
    answer(dialog, error.message, "refused");
  } finally {
    running = false;
    dialog.removeAttribute("aria-busy");
    for (const one of buttons) one.disabled = false;
    // a disabled button loses the focus, and the form may be gone
    (button.offsetParent ? button : dialog.querySelector("[data-close]")).focus();
  }
}

export function start() {
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-dialog]");
    if (button) open(button);
    if (event.target.closest("[data-close]")) event.target.closest("dialog").close();
    // a click beside a modal dialog is one on the dialog itself
    if (event.target.localName === "dialog" && !running) event.target.close();
  });
  document.addEventListener("submit", (event) => {
    if (!event.target.dataset.action) return;
    event.preventDefault();
    run(event.target, event.submitter ?? event.target.querySelector("button"));
  });
  for (const dialog of document.querySelectorAll("dialog")) {
    // Escape while a request runs would hide its answer
    dialog.addEventListener("cancel", (event) => running && event.preventDefault());
    if (dialog !== confirmation) dialog.addEventListener("close", () => (opener = null));
  }
  document.addEventListener("shown", follow);
}
