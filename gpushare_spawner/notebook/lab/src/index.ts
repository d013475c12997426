/** The plugin: a status item, notifications, a dialog and commands for the GPU share of this server. */

import { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ICommandPalette } from '@jupyterlab/apputils';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { IStatusBar } from '@jupyterlab/statusbar';

import { CellCosts } from './cellCosts';
import { HOUR, IControls, KEEP_AT_ONCE_HOURS } from './controls';
import { Notifier, seenAdvice, seenMessages } from './notifier';
import { Poller } from './poller';
import { Samples } from './samples';
import { ask, fetchCells, fetchStatus } from './server';
import { ShareDialog } from './shareDialog';
import { AskKind, IShareStatus } from './status';
import { StatusItem } from './statusItem';
import * as words from './words';

const PLUGIN_ID = '@gpushare/lab:plugin';
/** Seconds that the plots show. */
const SPAN = 300;

const plugin: JupyterFrontEndPlugin<void> = {
  id: PLUGIN_ID,
  description:
    'Shows the GPU share of this server, notifies the user of its changes, and offers to keep or release it.',
  autoStart: true,
  optional: [IStatusBar, ICommandPalette, ISettingRegistry],
  activate: (
    app: JupyterFrontEnd,
    statusBar: IStatusBar | null,
    palette: ICommandPalette | null,
    registry: ISettingRegistry | null
  ) => {
    const settings = app.serviceManager.serverSettings;
    const costs = new CellCosts(kernelId =>
      status && !status.shared ? Promise.resolve([]) : fetchCells(settings, kernelId)
    );
    app.docRegistry.addWidgetExtension('Notebook', costs);
    registry?.load(PLUGIN_ID).then(
      loaded => costs.follow(loaded),
      reason => console.debug('gpushare: no settings:', reason)
    );
    const samples = new Samples(SPAN);
    const controls: IControls = {
      ask: async (kind, value = 0) => {
        const answer = await ask(settings, kind, value);
        notifier.asked(kind, answer.done);
        void poller.poll();
        return answer;
      },
      open: () => dialog.open()
    };
    const dialog = new ShareDialog(samples, controls);
    const item = new StatusItem(samples, controls.open);
    const notifier = new Notifier(controls, seenMessages(settings.baseUrl), seenAdvice(settings.baseUrl));
    let status: IShareStatus | undefined;
    const poller = new Poller(
      () => fetchStatus(settings),
      now => {
        status = now;
        if (now?.known && now.measured) {
          samples.add(now);
        }
        for (const part of [item, notifier, dialog]) {
          part.showStatus(now);
        }
        app.commands.notifyCommandChanged();
      }
    );

    if (statusBar) {
      statusBar.registerStatusItem(PLUGIN_ID, { item, align: 'left', rank: 3 });
    } else if (app.name === 'Jupyter Notebook') {
      app.shell.add(item, 'menu', { rank: 11000 }); // without a status bar, at the end of the menu bar
    }

    /** Send the request, and show the answer as a notification, because a command has no other place for it. */
    const askAloud = async (kind: AskKind, value?: number) => {
      const answer = await controls.ask(kind, value);
      notifier.answer(answer.text, answer.done);
    };
    const offered = (kind: AskKind) => () => Boolean(status?.known && status.asks.includes(kind));
    app.commands.addCommand('gpushare:open', {
      label: words.TITLE,
      isVisible: () => Boolean(status?.shared),
      execute: controls.open
    });
    app.commands.addCommand('gpushare:keep', {
      label: words.KEEP_COMMAND,
      isVisible: offered('keep'),
      execute: args => askAloud('keep', Number(args.hours ?? KEEP_AT_ONCE_HOURS) * HOUR)
    });
    app.commands.addCommand('gpushare:release', {
      label: words.RELEASE_COMMAND,
      isVisible: offered('release'),
      execute: () => askAloud('release')
    });
    for (const command of ['gpushare:open', 'gpushare:keep', 'gpushare:release']) {
      palette?.addItem({ command, category: words.TITLE });
    }

    void app.started.then(() => poller.poll());
  }
};

export default plugin;
