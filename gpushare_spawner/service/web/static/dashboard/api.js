// Requests to the service.

const body = document.body;

/* The hub's library takes the cookie of a script's request only together with the token of the page. */
export function headers() {
  return { "X-XSRFToken": body.dataset.xsrf };
}

export class RequestFailed extends Error {}

export class LoggedOut extends RequestFailed {
  constructor() {
    super("You are logged out.");
  }
}

/* Raises RequestFailed with a sentence. Raises LoggedOut where the login has ended: the page stays, with what is typed. */
export async function request(address, options = {}) {
  let answer;
  try {
    answer = await fetch(address, {
      cache: "no-store",
      redirect: "manual",
      ...options,
      headers: { ...headers(), ...options.headers },
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestFailed("The service cannot be reached.");
  }
  if (answer.type === "opaqueredirect") {
    throw new LoggedOut();
  }
  if (answer.status === 401 || (answer.status === 403 && !(await knows()))) throw new LoggedOut();
  if (!answer.ok) throw new RequestFailed((await sentenceOf(answer)) || `The service answered ${answer.status}.`);
  return answer;
}

/* Whether the service still knows the user: it leads a page's request without a login to the hub. */
async function knows() {
  const answer = await fetch(location.href, { method: "GET", cache: "no-store", redirect: "manual" }).catch(() => null);
  return answer?.type !== "opaqueredirect";
}

async function sentenceOf(answer) {
  try {
    return (await answer.json()).message;
  } catch {
    return ""; // not from the service, but from a proxy before it
  }
}

/* Calls the REST API: `path` below api/v1/. Returns the answer's data. */
export async function call(method, path, data) {
  const options = { method };
  if (data !== undefined) {
    options.body = JSON.stringify(data);
    options.headers = { "Content-Type": "application/json" };
  }
  return (await request(`${body.dataset.prefix}api/v1/${path}`, options)).json();
}
