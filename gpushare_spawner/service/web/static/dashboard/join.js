// Makes what is shown like a fresh copy of it. Nodes that stay are kept, so that focus, scroll position, selected text
// and open menus survive.

/* Children are recognised by their id or data-key, others by their place. */
function keyOf(node) {
  return node.nodeType === Node.ELEMENT_NODE ? node.id || node.dataset.key || "" : "";
}

function alike(shown, fresh) {
  return shown.nodeType === fresh.nodeType && shown.nodeName === fresh.nodeName && keyOf(shown) === keyOf(fresh);
}

function joinAttributes(shown, fresh) {
  for (const { name } of [...shown.attributes]) {
    // the user has opened it: the page from the server is always closed
    if (!fresh.hasAttribute(name) && !(shown.localName === "details" && name === "open")) shown.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (shown.getAttribute(name) !== value) shown.setAttribute(name, value);
  }
}

function joinNode(shown, fresh) {
  if (shown.nodeType !== Node.ELEMENT_NODE) {
    if (shown.data !== fresh.data) shown.data = fresh.data;
    return;
  }
  joinAttributes(shown, fresh);
  if (shown.localName === "select" && shown === document.activeElement) return; // its list may be open
  joinChildren(shown, fresh);
}

function joinChildren(shown, fresh) {
  const stays = new Set([...fresh.children].map(keyOf));
  const known = new Map();
  for (const child of [...shown.children]) {
    const key = keyOf(child);
    if (!key) continue;
    if (stays.has(key)) known.set(key, child);
    else child.remove();
  }
  let place = shown.firstChild;
  for (const wanted of [...fresh.childNodes]) {
    const key = keyOf(wanted);
    const found = key ? known.get(key) : place !== null && alike(place, wanted) ? place : undefined;
    if (found === undefined || !alike(found, wanted)) {
      shown.insertBefore(document.importNode(wanted, true), place);
      continue;
    }
    if (found === place) place = place.nextSibling;
    else shown.insertBefore(found, place);
    joinNode(found, wanted);
  }
  while (place !== null) {
    const next = place.nextSibling;
    place.remove();
    place = next;
  }
}

/* Both are elements of the same kind. */
export function join(shown, fresh) {
  const focused = document.activeElement;
  joinNode(shown, fresh);
  // an element that moves loses the focus
  if (focused !== document.activeElement && focused.isConnected) focused.focus({ preventScroll: true });
}
