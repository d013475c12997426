/** Helpers that create HTML elements. All text is set as text, never as HTML. */

import { instantsInFull, localised } from './localTime';

type Child = Node | string;

/** Create an element with its class and children. */
export function element<Tag extends keyof HTMLElementTagNameMap>(
  tag: Tag,
  className: string,
  ...children: Child[]
): HTMLElementTagNameMap[Tag] {
  const node = document.createElement(tag);
  if (className) {
    node.className = className;
  }
  node.append(...children);
  return node;
}

/** Create a button in JupyterLab's style. */
export function button(label: string, onClick: () => void, warn = false): HTMLButtonElement {
  const kind = warn ? 'jp-mod-warn' : 'jp-mod-reject';
  const node = element('button', `gpushare-Button jp-mod-styled ${kind}`, label);
  node.type = 'button';
  node.addEventListener('click', onClick);
  return node;
}

/** Show the time zone of an element's instants on hover. `text`: as the server wrote it. */
export function withZone<Shown extends HTMLElement>(node: Shown, text: string, at?: number | null): Shown {
  const title = instantsInFull(text, at);
  if (title) {
    node.title = title;
  }
  return node;
}

/** Replace an element's children, unless their text is unchanged, so that a screen reader does not repeat it. */
export function setLines(node: HTMLElement, tag: 'p' | 'li', lines: readonly string[]): void {
  const shown = lines.map(line => localised(line));
  const same =
    node.children.length === shown.length && shown.every((line, at) => node.children[at].textContent === line);
  if (!same) {
    node.replaceChildren(...lines.map((line, at) => withZone(element(tag, '', shown[at]), line)));
  }
}
