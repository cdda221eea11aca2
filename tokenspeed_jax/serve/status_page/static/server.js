// Requests to the server. The API key lives in this variable and nowhere else.

let key = "";

export function useKey(text) {
  key = text;
}

export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// `path` is relative, so that the page also works behind a proxy that puts it into a folder.
async function request(path, options = {}) {
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // Not from this server but from something in between; the status says enough.
  }
  const wait = response.headers.get("retry-after");
  return new ServerError(response.status, wait ? `${message}; try again in ${wait} s` : message);
}

export async function getJson(path) {
  return (await request(path, { signal: AbortSignal.timeout(10000) })).json();
}

// Events of a stream until [DONE]. A stream that ends without is one that broke.
export async function* postStream(path, body, signal) {
  const response = await request(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ServerError(0, "the connection ended before the reply did");
    buffer += value;
    const events = buffer.split("\n\n");
    buffer = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const payload = JSON.parse(data);
      if (payload.error) throw new ServerError(response.status, payload.error.message);
      yield payload;
    }
  }
}
