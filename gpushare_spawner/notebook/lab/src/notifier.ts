/** JupyterLab's notifications: idle actions, reclaimed units, refused allocations, messages, and advice. */

import { Notification } from '@jupyterlab/apputils';

import { HOUR, IControls, KEEP_AT_ONCE_HOURS } from './controls';
import { atLocalTime, localised } from './localTime';
import { adviceOf } from './shareChoices';
import { AskKind, IShareStatus } from './status';
import * as words from './words';

/** The topic of a notification. There is at most one notification per topic, which is updated. */
type Topic = 'share' | 'reclaimed' | 'limit' | 'answer' | 'advice' | `message ${number}`;
type Options = Notification.IOptions<null>;

const SHORT_MS = 8000;
/** Maximum characters. JupyterLab truncates longer notifications. */
const LETTERS = 140;

/** Stores the last message over page loads and for all tabs of this server, so that each is shown once. */
export interface ISeenMessages {
  get(): number;
  set(at: number): void;
}

/** For the server with this base URL, in the browser's storage. */
export function seenMessages(baseUrl: string): ISeenMessages {
  const key = `gpushare:message:${baseUrl}`;
  return {
    get: () => Number(window.localStorage.getItem(key) ?? 0),
    set: at => window.localStorage.setItem(key, String(at))
  };
}

/** Stores the last advice over page loads and for all tabs of this server, so that each is shown once. */
export interface ISeenAdvice {
  get(): string;
  set(advice: string): void;
}

/** For the server with this base URL, in the browser's storage. */
export function seenAdvice(baseUrl: string): ISeenAdvice {
  const key = `gpushare:advice:${baseUrl}`;
  return {
    get: () => window.localStorage.getItem(key) ?? '',
    set: advice => window.localStorage.setItem(key, advice)
  };
}

export class Notifier {
  constructor(
    private readonly _controls: IControls,
    private readonly _seen: ISeenMessages,
    private readonly _seenAdvice: ISeenAdvice
  ) {}

  /** Show the changes in a status. */
  showStatus(status: IShareStatus | undefined): void {
    if (status === undefined || !status.known) {
      return; // the agent is unavailable: the share is unknown
    }
    const before = this._before;
    this._before = status;
    this._showShare(status, before);
    this._showReclaimed(status, before);
    this._showMessages(status);
    void this._showAdvice(status);
    if (before !== undefined) {
      this._showLimit(status, before); // the dialog shows refusals from before this page was open
    }
  }

  /** Record the user's request: a requested release needs no notification in addition to its answer. */
  asked(kind: AskKind, done: boolean): void {
    if (kind === 'release' && done) {
      this._releasedByUser = true;
    }
  }

  /** Show the answer to the user's request. */
  answer(text: string, done: boolean): void {
    this._say('answer', text, done ? 'success' : 'warning', { autoClose: done ? SHORT_MS : false });
  }

  private _showShare(status: IShareStatus, before: IShareStatus | undefined): void {
    const action = status.notice;
    const key = action ? `${action.tier} ${action.at}` : undefined;
    const newNotice = key !== this._notice;
    const newTier = before !== undefined && before.tier !== status.tier;
    this._notice = key;
    const asItWasAsked = newTier && status.tier === 'released' && this._releasedByUser;
    this._releasedByUser = this._releasedByUser && !newTier;
    if (newNotice && action) {
      const actions = this._noticeActions(status);
      this._say('share', atLocalTime(status.notice_text, action.at), 'warning', { autoClose: false, actions });
    } else if (newTier && !asItWasAsked) {
      const restored = status.tier === 'active';
      const autoClose = restored ? SHORT_MS : false;
      this._say('share', status.changed_text, restored ? 'success' : 'warning', { autoClose });
    } else if (newNotice || asItWasAsked) {
      this._dismiss('share'); // the notice was withdrawn
    }
  }

  private _noticeActions(status: IShareStatus): Notification.IAction[] {
    const actions: Notification.IAction[] = [];
    if (status.notice_controls.includes('keep')) {
      actions.push({
        label: words.keepHours(KEEP_AT_ONCE_HOURS),
        callback: () => void this._ask('keep', KEEP_AT_ONCE_HOURS * HOUR),
        displayType: 'accent'
      });
    }
    if (status.notice_controls.includes('release')) {
      actions.push({ label: words.RELEASE, callback: () => void this._ask('release') });
    }
    if (!status.asks.length && status.dashboard) {
      actions.push(dashboardAction(status));
    }
    return actions;
  }

  private async _ask(kind: 'keep' | 'release' | 'share', value?: number): Promise<void> {
    this._say('answer', words.ASKING, 'in-progress', { autoClose: false });
    const answer = await this._controls.ask(kind, value);
    this.answer(answer.text, answer.done);
  }

  private _showReclaimed(status: IShareStatus, before: IShareStatus | undefined): void {
    if (!status.reclaimed_text) {
      this._dismiss('reclaimed');
    } else if (!before || before.reclaimed_text !== status.reclaimed_text) {
      const actions = status.dashboard ? [dashboardAction(status)] : [];
      this._say('reclaimed', status.reclaimed_text, 'info', { autoClose: false, actions });
    }
  }

  /** Show each message once, and dismiss withdrawn messages. */
  private _showMessages(status: IShareStatus): void {
    const standing = new Set<Topic>();
    for (const message of status.messages) {
      const topic: Topic = `message ${message.at}`;
      standing.add(topic);
      if (message.at > this._seen.get()) {
        this._seen.set(message.at);
        const text = `${words.MESSAGE}: ${message.text}`;
        this._say(topic, text, 'info', { autoClose: false, actions: text.length > LETTERS ? [this._details] : [] });
      }
    }
    for (const topic of [...this._ids.keys()]) {
      if (topic.startsWith('message ') && !standing.has(topic)) {
        this._dismiss(topic);
      }
    }
  }

  /** Ask for advice on the size of the share once per page load, and show each advice once. */
  private async _showAdvice(status: IShareStatus): Promise<void> {
    if (this._hasAskedForAdvice || !status.asks.length) {
      return;
    }
    this._hasAskedForAdvice = true;
    const advice = adviceOf(await this._controls.ask('advice'));
    const key = advice && `${status.share_units} ${advice.units}`;
    if (advice && key && key !== this._seenAdvice.get()) {
      this._seenAdvice.set(key);
      const change = {
        label: words.changeTo(advice.units),
        callback: () => void this._ask('share', advice.units)
      };
      this._say('advice', advice.text, 'info', { autoClose: false, actions: [change] });
    }
  }

  private _showLimit(status: IShareStatus, before: IShareStatus): void {
    const [hit, last] = [status.limit_hit, before.limit_hit];
    if (hit && hit.count !== (last ? last.count : 0)) {
      this._say('limit', status.limit_text, 'error', { autoClose: false, actions: [this._details] });
    }
  }

  private get _details(): Notification.IAction {
    return { label: words.DETAILS, callback: () => this._controls.open() };
  }

  /** Update the notification, or show it again if it was closed. */
  private _say(topic: Topic, message: string, type: Notification.TypeOptions, options: Options): void {
    // an update keeps the buttons that it does not replace
    const all = { actions: [], ...options };
    const id = this._ids.get(topic);
    const shown = localised(message);
    if (id === undefined || !Notification.update({ id, message: shown, type, ...all })) {
      this._ids.set(topic, Notification.emit(shown, type, all));
    }
  }

  private _dismiss(topic: Topic): void {
    const id = this._ids.get(topic);
    if (id !== undefined) {
      Notification.dismiss(id);
      this._ids.delete(topic);
    }
  }

  private _before: IShareStatus | undefined;
  private _notice: string | undefined;
  private _releasedByUser = false;
  private _hasAskedForAdvice = false;
  private readonly _ids = new Map<Topic, string>();
}

function dashboardAction(status: IShareStatus): Notification.IAction {
  return { label: words.DASHBOARD, callback: () => void window.open(status.dashboard, '_blank', 'noopener') };
}
