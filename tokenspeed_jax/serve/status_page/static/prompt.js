// The box that tries a prompt: a chat where the model has a template, else a completion.

import { byId, element } from "./dom.js";
import { count, seconds } from "./format.js";
import { postStream } from "./server.js";

export class Prompt {
  // `onRefusedKey` is called when the server wants another API key.
  constructor(onRefusedKey) {
    this.onRefusedKey = onRefusedKey;
    this.model = "";
    this.isChat = true;
    this.isTouched = false;
    this.stopping = null;
    this.form = byId("prompt-form");
    this.text = byId("prompt");
    this.reply = byId("reply");
    this.note = byId("reply-note");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.stopping === null) this.run();
    });
    this.text.addEventListener("input", () => { this.isTouched = true; });
    this.text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.form.requestSubmit();
    });
    byId("stop").addEventListener("click", () => this.stopping?.abort());
  }

  setModel(name, isChat, maxModelLen) {
    this.model = name;
    this.isChat = isChat;
    byId("prompt-label").textContent = isChat ? "Message" : "Text to continue";
    if (!this.isTouched && !isChat) this.text.value = "The capital of France is";
    byId("max-tokens").max = maxModelLen;
    if (maxModelLen < 256) byId("max-tokens").value = Math.max(1, Math.floor(maxModelLen / 4));
  }

  body() {
    const shared = {
      model: this.model,
      max_tokens: byId("max-tokens").valueAsNumber || null,
      temperature: Number.isNaN(byId("temperature").valueAsNumber) ? null : byId("temperature").valueAsNumber,
      stream: true,
      stream_options: { include_usage: true },
    };
    const text = this.text.value;
    return this.isChat ? { messages: [{ role: "user", content: text }], ...shared } : { prompt: text, ...shared };
  }

  async run() {
    const begin = performance.now();
    const seen = { first: null, tokens: 0, reason: "" };
    this.start();
    try {
      const path = this.isChat ? "v1/chat/completions" : "v1/completions";
      for await (const chunk of postStream(path, this.body(), this.stopping.signal)) this.take(chunk, seen);
      this.say(summary(seen, begin));
    } catch (error) {
      if (error.name === "AbortError") this.say(`Stopped after ${seconds((performance.now() - begin) / 1000)}.`);
      else this.fail(error);
    } finally {
      this.stopping = null;
      this.setBusy(false);
    }
  }

  start() {
    this.stopping = new AbortController();
    this.setBusy(true);
    this.reply.replaceChildren();
    if (!this.isChat) this.append("prompt", this.text.value);
    this.say("Waiting for the first token.");
  }

  setBusy(isBusy) {
    byId("send").disabled = isBusy;
    const [from, to] = isBusy ? ["send", "stop"] : ["stop", "send"];
    const hadFocus = document.activeElement === byId(from);
    byId("stop").disabled = !isBusy;
    if (hadFocus) byId(to).focus({ preventScroll: true });
  }

  take(chunk, seen) {
    if (chunk.usage) seen.tokens = chunk.usage.completion_tokens;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    if (choice.finish_reason) seen.reason = choice.finish_reason;
    const content = this.isChat ? choice.delta.content : choice.text;
    const reasoning = this.isChat ? choice.delta.reasoning : null;
    if (!content && !reasoning) return;
    if (seen.first === null) {
      seen.first = performance.now();
      this.say("Generating.");
    }
    if (reasoning) this.append("reasoning", reasoning);
    if (content) this.append("content", content);
  }

  append(kind, text) {
    const isAtEnd = this.reply.scrollHeight - this.reply.scrollTop - this.reply.clientHeight < 40;
    if (this.reply.lastChild?.className === kind) this.reply.lastChild.append(text);
    else this.reply.append(element("span", { class: kind }, text));
    if (isAtEnd) this.reply.scrollTop = this.reply.scrollHeight;
  }

  say(text) {
    this.note.className = "";
    this.note.textContent = text;
  }

  fail(error) {
    if (error.status === 401) this.onRefusedKey();
    this.note.className = "error";
    this.note.textContent = error.status === undefined ? "The server cannot be reached." : `Not answered: ${error.message}`;
  }
}

function summary({ first, tokens, reason }, begin) {
  const end = performance.now();
  const parts = [`${count(tokens)} tokens in ${seconds((end - begin) / 1000)}`];
  if (first !== null) {
    parts.push(`the first after ${seconds((first - begin) / 1000)}`);
    if (tokens > 1 && end > first) parts.push(`then ${count(((tokens - 1) * 1000) / (end - first))} a second`);
  }
  if (reason === "length") parts.push("cut at the limit");
  return `${parts.join(", ")}.`;
}
