/** Polls the server for the status every few seconds while the page is visible. */

import { IShareStatus } from './status';

const POLL_MS = 5000;

export class Poller {
  /**
   * `fetchStatus` returns undefined where the server extension is not enabled: then polling ends. `show` gets each
   * status, and undefined while the server is unavailable.
   */
  constructor(
    private readonly _fetchStatus: () => Promise<IShareStatus | undefined>,
    private readonly _show: (status: IShareStatus | undefined) => void
  ) {
    document.addEventListener('visibilitychange', () => {
      if (!document.hidden) {
        void this.poll();
      }
    });
  }

  /** Poll now, and then every POLL_MS. */
  async poll(): Promise<void> {
    if (this._asking || this._ended) {
      return;
    }
    window.clearTimeout(this._timer);
    this._asking = true;
    try {
      const status = await this._fetchStatus();
      if (status === undefined) {
        this._ended = true;
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
      this._timer = window.setTimeout(() => void this.poll(), POLL_MS);
    }
  }

  private _timer: number | undefined;
  private _asking = false;
  private _ended = false;
}
