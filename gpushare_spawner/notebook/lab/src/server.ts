/** Requests to the server extension. */

import { URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';

import { AskKind, IAskAnswer, ICellCost, IShareStatus } from './status';
import { NO_ANSWER, PERHAPS_STOPPED } from './words';

/** Return the status; undefined if the server extension is not enabled. */
export async function fetchStatus(settings: ServerConnection.ISettings): Promise<IShareStatus | undefined> {
  const response = await request(settings, 'status', { method: 'GET', cache: 'no-store' });
  if (response.status === 404) {
    return undefined;
  }
  if (!response.ok) {
    throw new Error(`the server answered ${response.status}`);
  }
  return (await response.json()) as IShareStatus;
}

/** Return the executions of a kernel's cells, earliest first; none if the agent is unavailable. */
export async function fetchCells(settings: ServerConnection.ISettings, kernelId: string): Promise<ICellCost[]> {
  const path = `cells?kernel=${encodeURIComponent(kernelId)}`;
  const response = await request(settings, path, { method: 'GET', cache: 'no-store' });
  return response.ok ? ((await response.json()) as { cells: ICellCost[] }).cells : [];
}

/** Send a request to the service. `value`: seconds of a keep, units of a share. Throws nothing. */
export async function ask(settings: ServerConnection.ISettings, kind: AskKind, value: number): Promise<IAskAnswer> {
  try {
    const response = await request(settings, 'ask', { method: 'POST', body: JSON.stringify({ kind, value }) });
    const answer = (await response.json()) as { done?: boolean; text?: string; message?: string };
    return { done: Boolean(answer.done), text: answer.text ?? answer.message ?? NO_ANSWER };
  } catch (reason) {
    console.debug('gpushare: no answer:', reason);
    // a server that is being stopped ends before the answer arrives
    return kind === 'stop' ? { done: true, text: PERHAPS_STOPPED } : { done: false, text: NO_ANSWER };
  }
}

function request(settings: ServerConnection.ISettings, path: string, init: RequestInit): Promise<Response> {
  return ServerConnection.makeRequest(URLExt.join(settings.baseUrl, 'gpushare', path), init, settings);
}
