// Filters, columns and pages without loading the page again. The state is the address, as it is without scripts.

import { show } from "./view.js";

const PAUSE_MS = 250; // while somebody types
let timer = 0;

function addressOf(form) {
  const fields = new URLSearchParams(new FormData(form));
  for (const [name, value] of [...fields]) {
    if (!value || value === form.elements[name].dataset.default) fields.delete(name);
  }
  const query = fields.toString();
  return form.getAttribute("action") + (query && `?${query}`);
}

/* Fields show what the address says: the user may have gone back. */
function synchronise() {
  const form = document.getElementById("filters");
  for (const field of form?.elements ?? []) {
    if (field === document.activeElement) continue;
    if (field.type === "checkbox") field.checked = field.defaultChecked;
    else if (field.localName === "select") {
      field.value = [...field.options].find((option) => option.defaultSelected)?.value ?? "";
    } else if ("defaultValue" in field) field.value = field.defaultValue;
  }
}

export function start() {
  document.addEventListener("click", async (event) => {
    const link = event.target.closest("a[data-moves]");
    if (!link || event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    const section = link.closest("section[id]");
    await show(link.href);
    // the next page begins at its top
    if (section.getBoundingClientRect().top < 0) section.scrollIntoView();
  });
  document.addEventListener("input", (event) => {
    const form = event.target.closest("#filters");
    if (!form) return;
    clearTimeout(timer);
    const typed = event.target.localName === "input" && event.target.type !== "checkbox";
    timer = setTimeout(() => show(addressOf(form), typed), typed ? PAUSE_MS : 0);
  });
  document.addEventListener("submit", (event) => {
    if (event.target.id !== "filters") return;
    event.preventDefault();
    clearTimeout(timer);
    show(addressOf(event.target));
  });
  document.addEventListener("shown", synchronise);
}
