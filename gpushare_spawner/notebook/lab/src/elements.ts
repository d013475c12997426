/** Short ways to make HTML elements. All text is set as text, never as HTML. */

type Child = Node | string;

/** Make an element with its class, and its children. */
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

/** Make a button in JupyterLab's style. */
export function button(label: string, onClick: () => void, warn = false): HTMLButtonElement {
  const kind = warn ? 'jp-mod-warn' : 'jp-mod-reject';
  const node = element('button', `gpushare-Button jp-mod-styled ${kind}`, label);
  node.type = 'button';
  node.addEventListener('click', onClick);
  return node;
}

/** Replace an element's children, unless they say the same: so a screen reader does not read them again. */
export function setLines(node: HTMLElement, tag: 'p' | 'li', lines: readonly string[]): void {
  const same =
    node.children.length === lines.length && lines.every((line, at) => node.children[at].textContent === line);
  if (!same) {
    node.replaceChildren(...lines.map(line => element(tag, '', line)));
  }
}
