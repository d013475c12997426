// Takes the colour scheme that the user has chosen on the hub's pages, and lets them change it here.
// Runs before the page is drawn, so that it is never drawn in the other scheme first.
"use strict";

const KEY = "jupyterhub-bs-theme"; // where the hub's own pages keep the choice (static/js/darkmode.js of JupyterHub)
const root = document.documentElement;
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");

function chosen() {
  try {
    const scheme = localStorage.getItem(KEY);
    return scheme === "light" || scheme === "dark" ? scheme : null;
  } catch {
    return null; // the browser keeps nothing for this site
  }
}

function apply() {
  root.dataset.bsTheme = chosen() ?? (systemIsDark.matches ? "dark" : "light");
}

root.classList.add("js");
apply();
systemIsDark.addEventListener("change", apply);
addEventListener("storage", apply); // another tab has changed it
document.addEventListener("click", (event) => {
  if (!event.target.closest("#scheme")) return;
  const scheme = root.dataset.bsTheme === "dark" ? "light" : "dark";
  try {
    localStorage.setItem(KEY, scheme);
  } catch {
    // it holds for this page then
  }
  root.dataset.bsTheme = scheme;
});
