/*
 * The part of gpushare-spawner that runs in JupyterLab 4 and Notebook 7: an item in the status bar and notifications.
 *
 * JupyterLab loads prebuilt extensions as webpack "module federation" containers: an object with init(shareScope), which gets the
 * shared modules, and get(name), which returns a factory of a module. This file is such a container, written by hand, so that it
 * can be read and changed without a bundler.
 */
(() => {
  'use strict';

  const POLL_MS = 5000;
  const STATUS_PATH = 'gpushare/status';
  const PLUGIN_ID = '@gpushare/lab:plugin';

  let shared = {};

  /* Returns the module that JupyterLab itself uses: the loaded version, else the highest one; undefined if there is none. */
  async function load(name) {
    const versions = shared[name] || {};
    const best = Object.keys(versions).sort((a, b) => {
      const loaded = Boolean(versions[b].loaded) - Boolean(versions[a].loaded);
      return loaded || b.localeCompare(a, undefined, { numeric: true });
    })[0];
    return best === undefined ? undefined : (await versions[best].get())();
  }

  /* On 24 hours, with the day if it is not today. */
  function clock(at) {
    const time = at.toLocaleTimeString([], { hour: '2-digit', minute: '2-digit', hourCycle: 'h23' });
    if (at.toDateString() === new Date().toDateString()) {
      return time;
    }
    return `${time} on ${at.getDate()} ${at.toLocaleDateString('en-US', { month: 'short' })}`;
  }

  /* The server writes {time} for an instant: only the browser knows the reader's time zone. */
  function atLocalTime(text, action) {
    return text.replaceAll('{time}', action ? clock(new Date(action.at * 1000)) : '');
  }

  /* Asks the server for the status every few seconds, while the page is visible. */
  class Poller {
    constructor(fetchStatus, show) {
      this._fetch = fetchStatus;
      this._show = show;
      this._timer = undefined;
      this._asking = false;
      this._ended = false;
      document.addEventListener('visibilitychange', () => {
        if (!document.hidden) {
          void this.poll();
        }
      });
    }

    async poll() {
      if (this._asking || this._ended) {
        return;
      }
      clearTimeout(this._timer);
      this._asking = true;
      try {
        const status = await this._fetch();
        if (status === undefined) {
          this._ended = true; // the server extension is not enabled
        } else {
          this._show(status);
        }
      } catch (reason) {
        console.debug('gpushare: no status:', reason);
        this._show(undefined);
      } finally {
        this._asking = false;
      }
      if (!document.hidden && !this._ended) {
        this._timer = setTimeout(() => void this.poll(), POLL_MS);
      }
    }
  }

  /*
   * Three notifications at most: one about the share (a notice of an idle action, or a new tier), one about borrowed units that
   * their owners reclaimed, and one about the last memory allocation that a limit refused. Each is updated, so that they do not
   * pile up.
   */
  class Notifier {
    constructor(Notification, explain) {
      this._notification = Notification;
      this._explain = explain;
      this._before = undefined;
      this._notice = undefined;
      this._toasts = {};
    }

    show(status) {
      if (!status || !status.known) {
        return; // the agent is unavailable: the share is unknown
      }
      const before = this._before;
      this._before = status;
      this._showShare(status, before);
      this._showReclaimed(status, before);
      if (before !== undefined) {
        this._showLimit(status, before); // the dialog shows what was refused before this page was open
      }
    }

    /* Updates the notification, or shows it again if the user has closed it, or if it has closed by itself. */
    _say(about, message, type, options) {
      const id = this._toasts[about];
      if (id === undefined || !this._notification.update({ id, message, type, ...options })) {
        this._toasts[about] = this._notification.emit(message, type, options);
      }
    }

    _dismiss(about) {
      if (this._toasts[about] !== undefined) {
        this._notification.dismiss(this._toasts[about]);
        this._toasts[about] = undefined;
      }
    }

    _showShare(status, before) {
      const action = status.announced;
      const key = action ? `${action.tier} ${action.at}` : undefined;
      const newNotice = key !== this._notice;
      const newTier = before !== undefined && before.tier !== status.tier;
      this._notice = key;
      if (newNotice && action) {
        this._say('share', atLocalTime(status.notice_text, action), 'warning', { autoClose: false });
      } else if (newTier) {
        const restored = status.tier === 'active';
        this._say('share', status.changed_text, restored ? 'success' : 'warning', { autoClose: restored ? 8000 : false });
      } else if (newNotice) {
        this._dismiss('share'); // the notice was withdrawn
      }
    }

    _showReclaimed(status, before) {
      if (!status.reclaimed_text) {
        this._dismiss('reclaimed');
      } else if (!before || before.reclaimed_text !== status.reclaimed_text) {
        const open = { label: 'Dashboard', callback: () => window.open(status.dashboard, '_blank', 'noopener') };
        this._say('reclaimed', status.reclaimed_text, 'info', { autoClose: false, actions: status.dashboard ? [open] : [] });
      }
    }

    _showLimit(status, before) {
      const [hit, last] = [status.limit_hit, before.limit_hit];
      if (hit && hit.count !== (last ? last.count : 0)) {
        const details = { label: 'Details', callback: () => this._explain(atLocalTime(status.explanation, status.announced)) };
        this._say('limit', status.limit_text, 'error', { autoClose: false, actions: [details] });
      }
    }
  }

  /* The item in the status bar: a button, so that keyboards and touch screens reach its explanation too. */
  function makeItem(Widget, explain) {
    const node = document.createElement('div');
    node.className = 'gpushare-item';
    const button = document.createElement('button');
    button.type = 'button';
    button.addEventListener('click', () => explain(button.title));
    node.appendChild(button);
    const widget = new Widget({ node });
    widget.id = 'gpushare-item';
    widget.hide();

    function show(status) {
      const line = status ? status.line : 'GPU share: unknown';
      widget.setHidden(!line || (!status && widget.isHidden));
      button.textContent = line;
      button.title = status
        ? atLocalTime(status.explanation, status.announced)
        : 'The notebook server is unavailable.';
      button.setAttribute('aria-label', `${line}. ${button.title}`);
      const known = Boolean(status && status.known);
      node.dataset.tier = known ? status.tier : 'unknown';
      node.dataset.lease = known ? status.lease : 'none';
      node.dataset.announced = known && status.announced ? 'yes' : 'no';
    }

    return { widget, show };
  }

  const STYLE = `
    .gpushare-item { display: flex; align-items: center; align-self: center; height: 100%; }
    #menu-panel .gpushare-item { height: auto; margin-left: auto; }
    .gpushare-item.lm-mod-hidden { display: none; }
    .gpushare-item button {
      all: unset; cursor: pointer; padding: 0 6px; height: 100%; white-space: nowrap; display: flex; align-items: center;
      font-size: var(--jp-ui-font-size1); color: var(--jp-ui-font-color1);
    }
    .gpushare-item button:hover { background: var(--jp-layout-color3); }
    .gpushare-item button:focus-visible { outline: 2px solid var(--jp-brand-color1); outline-offset: -2px; }
    .gpushare-item button::before {
      content: ''; display: inline-block; width: 8px; height: 8px; margin-right: 6px; border-radius: 50%;
      background: var(--jp-success-color1, #388e3c);
    }
    .gpushare-item[data-announced='yes'] button::before,
    .gpushare-item[data-lease='waiting'] button::before,
    .gpushare-item[data-tier='downgraded'] button::before { background: var(--jp-warn-color1, #f57c00); }
    .gpushare-item[data-tier='released'] button::before,
    .gpushare-item[data-tier='unknown'] button::before {
      background: transparent; box-shadow: inset 0 0 0 2px var(--jp-ui-font-color2, #757575);
    }
  `;

  async function extension() {
    const [apputils, services, statusbar, widgets] = await Promise.all(
      ['@jupyterlab/apputils', '@jupyterlab/services', '@jupyterlab/statusbar', '@lumino/widgets'].map(load)
    );
    const { Dialog, Notification, showDialog } = apputils;
    const { ServerConnection } = services;

    function explain(text) {
      const node = document.createElement('div');
      for (const sentence of text.split('\n')) {
        node.appendChild(document.createElement('p')).textContent = sentence;
      }
      const body = new widgets.Widget({ node });
      void showDialog({ title: 'GPU share', body, buttons: [Dialog.okButton({ label: 'OK' })] });
    }

    function activate(app, statusBar) {
      const settings = app.serviceManager.serverSettings;
      async function fetchStatus() {
        const response = await ServerConnection.makeRequest(
          settings.baseUrl + STATUS_PATH,
          { method: 'GET', cache: 'no-store' },
          settings
        );
        if (response.status === 404) {
          return undefined;
        }
        if (!response.ok) {
          throw new Error(`the server answered ${response.status}`);
        }
        return response.json();
      }

      const notifier = new Notifier(Notification, explain);
      const style = document.createElement('style');
      style.textContent = STYLE;
      document.head.appendChild(style);
      const item = makeItem(widgets.Widget, explain);
      if (statusBar) {
        statusBar.registerStatusItem(PLUGIN_ID, { item: item.widget, align: 'left', rank: 3 });
      } else if (app.name === 'Jupyter Notebook') {
        app.shell.add(item.widget, 'menu', { rank: 11000 }); // Notebook has no status bar: at the end of the menu bar
      }
      const poller = new Poller(fetchStatus, status => {
        item.show(status);
        notifier.show(status);
      });
      void app.started.then(() => poller.poll());
    }

    const plugin = {
      id: PLUGIN_ID,
      description: 'Shows the GPU share of this server, and notifies the user before and after it changes.',
      autoStart: true,
      optional: statusbar ? [statusbar.IStatusBar] : [],
      activate
    };
    return { __esModule: true, default: plugin };
  }

  const container = {
    init(shareScope) {
      shared = shareScope;
    },
    async get(name) {
      if (name !== './extension') {
        throw new Error(`@gpushare/lab has no module ${name}`);
      }
      const module = await extension();
      return () => module;
    }
  };

  window._JUPYTERLAB = window._JUPYTERLAB || {};
  window._JUPYTERLAB['@gpushare/lab'] = container;
})();
