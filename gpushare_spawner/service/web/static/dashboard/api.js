// Requests to the service.

const body = document.body;

/* The hub's library takes the cookie of a script's request only together with the token of the page. */
export function headers() {
  return { "X-XSRFToken": body.dataset.xsrf };
}

export class RequestFailed extends Error {}

/* Raises RequestFailed with a sentence. Loads the page again where the user is logged out: the hub asks for the login. */
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
    location.reload();
    throw new RequestFailed("You are logged out.");
  }
  if (!answer.ok) throw new RequestFailed((await sentenceOf(answer)) || `The service answered ${answer.status}.`);
  return answer;
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
