/** A line under each notebook cell that has used the GPU, with its GPU time, its peak of memory and its waits. */

import { JupyterFrontEnd } from '@jupyterlab/application';
import { KernelMessage } from '@jupyterlab/services';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { PanelLayout, Widget } from '@lumino/widgets';

import { ICellCost } from './status';

/** Milliseconds after the end of a cell: soon, and when the agent's figures no longer change. */
const FETCH_AFTER_MS = [300, 2500];
const METADATA_KEY = 'gpushare';

type NotebookExtension = Parameters<JupyterFrontEnd['docRegistry']['addWidgetExtension']>[1];
type Context = Parameters<NotebookExtension['createNew']>[1];

/** The part of JupyterLab's `Cell` that is used here. */
interface ICell extends Widget {
  model: { id: string; getMetadata(key: string): unknown; setMetadata(key: string, value: unknown): void };
  /** Resolved when its DOM exists; a cell outside of the viewport has none. */
  ready?: Promise<void>;
}

/** The choices of the user, see schema/plugin.json. */
interface IChoices {
  show: boolean;
  save: boolean;
}

export class CellCosts {
  /** `fetchCosts` returns the cells of a kernel. */
  constructor(private readonly _fetchCosts: (kernelId: string) => Promise<ICellCost[]>) {}

  /** Follow the user's settings. */
  follow(settings: ISettingRegistry.ISettings): void {
    const changed = () => {
      this._choices.show = settings.composite.cellCosts !== false;
      this._choices.save = settings.composite.cellCostsInMetadata === true;
      this._notebooks.forEach(notebook => notebook.refresh());
    };
    settings.changed.connect(changed);
    changed();
  }

  /** Called by JupyterLab for each notebook. */
  createNew(panel: Widget, context: Context): void {
    const content = (panel as Widget & { content: { widgets: readonly ICell[] } }).content;
    const notebook = new NotebookCosts(content, context.sessionContext, this._choices, this._fetchCosts);
    this._notebooks.add(notebook);
    panel.disposed.connect(() => {
      notebook.dispose();
      this._notebooks.delete(notebook);
    });
  }

  private readonly _choices: IChoices = { show: true, save: false };
  private readonly _notebooks = new Set<NotebookCosts>();
}

class NotebookCosts {
  constructor(
    private readonly _content: { widgets: readonly ICell[] },
    private readonly _session: Context['sessionContext'],
    private readonly _choices: IChoices,
    private readonly _fetchCosts: (kernelId: string) => Promise<ICellCost[]>
  ) {
    this._session.iopubMessage.connect(this._received, this);
    void this._session.ready.then(() => this.refresh());
  }

  dispose(): void {
    this._session.iopubMessage.disconnect(this._received, this);
    this._timers.forEach(timer => window.clearTimeout(timer));
  }

  /** Show the figures as they are now. */
  refresh(): void {
    void this._update(false);
  }

  private _received(_: unknown, message: KernelMessage.IMessage): void {
    const parent = message.parent_header as Partial<KernelMessage.IHeader>;
    if (
      parent.msg_type === 'execute_request' &&
      KernelMessage.isStatusMsg(message) &&
      message.content.execution_state === 'idle'
    ) {
      this._timers.forEach(timer => window.clearTimeout(timer));
      this._timers = FETCH_AFTER_MS.map((delay, at) =>
        window.setTimeout(() => void this._update(at === FETCH_AFTER_MS.length - 1), delay)
      );
    }
  }

  /** `settled`: the figures of the cells that have ended no longer change. */
  private async _update(settled: boolean): Promise<void> {
    const kernel = this._session.session?.kernel;
    if (!this._choices.show && !this._choices.save) {
      this._content.widgets.forEach(cell => this._setLine(cell, ''));
      return;
    }
    let costs: ICellCost[] = [];
    try {
      costs = kernel ? await this._fetchCosts(kernel.id) : [];
    } catch (reason) {
      console.debug('gpushare: no cells:', reason);
    }
    const latest = new Map(costs.map(cost => [cost.cell_id, cost]));
    for (const cell of this._content.widgets) {
      const cost = latest.get(cell.model.id);
      if (cost) {
        this._setLine(cell, this._choices.show && !cost.running ? cost.line : '');
        if (settled && this._choices.save && cost.line && !cost.running) {
          save(cell, cost);
        }
      } else if (!this._choices.show) {
        this._setLine(cell, '');
      }
    }
  }

  private _setLine(cell: ICell, text: string): void {
    const shown = this._lines.get(cell);
    if (shown || text) {
      const line = shown ?? new Widget();
      line.node.textContent = text;
      line.setHidden(!text);
      if (!shown) {
        line.addClass('gpushare-CellCost');
        this._lines.set(cell, line);
        void Promise.resolve(cell.ready).then(() => {
          if (!cell.isDisposed) {
            (cell.layout as PanelLayout).addWidget(line);
          }
        });
      }
    }
  }

  private readonly _lines = new WeakMap<ICell, Widget>();
  private _timers: number[] = [];
}

/** Write a cell's figures to its metadata, unless they are there. */
function save(cell: ICell, cost: ICellCost): void {
  const { cell_id, line, running, ...figures } = cost;
  const before = cell.model.getMetadata(METADATA_KEY);
  if (JSON.stringify(before) !== JSON.stringify(figures)) {
    cell.model.setMetadata(METADATA_KEY, figures);
  }
}
