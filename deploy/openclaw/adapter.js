// HTTP to gateway-adapter: a call is repeated with the same id until it has its outcome.
import http from "node:http";
import https from "node:https";
import { setTimeout as sleep } from "node:timers/promises";

const FIRST_PAUSE = 500;
const LONGEST_PAUSE = 10_000;
// The adapter sends a line feed every 15 s while the person thinks.
const SILENCE = 60_000;
const TELL_FOR = 60_000;

export class Adapter {
  #config;
  #log;

  constructor(config, log) {
    this.#config = config;
    this.#log = log;
  }

  // Resolves with the outcome, however long that takes; rejects when the call can't be asked at
  // all or `signal` aborts.
  async open(call, body, signal) {
    let told = false;
    for (let pause = FIRST_PAUSE; ; pause = Math.min(pause * 2, LONGEST_PAUSE)) {
      signal?.throwIfAborted();
      let why;
      try {
        const answer = await this.#exchange("POST", path(call), body, signal);
        if (answer.status === 200) {
          // The adapter has taken it: it is back, or never was away.
          pause = FIRST_PAUSE;
          const outcome = parse(answer.text);
          if (outcome && !outcome.retry) return outcome;
          why = outcome?.reason ?? "the answer was cut off";
        } else if (isTransient(answer.status)) {
          why = `HTTP ${answer.status}`;
        } else {
          throw new Refused(explain(answer));
        }
      } catch (error) {
        signal?.throwIfAborted();
        if (error instanceof Refused) throw error;
        if (error.accepted) pause = FIRST_PAUSE;
        why = error.code ?? error.message;
      }
      if (!told) this.#log?.warn?.(`askbus: no answer from gateway-adapter yet (${why}), repeating`);
      told = true;
      await sleep(pause * (0.75 + Math.random() / 4), undefined, { signal });
    }
  }

  // Tells in the background that the call has the outcome.
  acknowledge(call, body) {
    this.#tell("POST", `${path(call)}/ack`, body);
  }

  // Tells in the background that nobody waits for the outcome any more.
  cancel(call, body) {
    this.#tell("DELETE", path(call), body);
  }

  async #tell(method, where, body) {
    const deadline = Date.now() + TELL_FOR;
    let why;
    for (let pause = FIRST_PAUSE; Date.now() < deadline; pause = Math.min(pause * 2, LONGEST_PAUSE)) {
      try {
        const answer = await this.#exchange(method, where, body, AbortSignal.timeout(LONGEST_PAUSE));
        if (!isTransient(answer.status)) {
          if (answer.status >= 400) this.#log?.warn?.(`askbus: ${method}: ${explain(answer)}`);
          return;
        }
        why = `HTTP ${answer.status}`;
      } catch (error) {
        why = error.code ?? error.message;
      }
      await sleep(pause, undefined, { ref: false });
    }
    this.#log?.warn?.(`askbus: ${method}: given up after ${TELL_FOR / 1000} s (${why})`);
  }

  // node:http, since fetch gives up after 300 s and can't tell a cut answer from a whole one.
  #exchange(method, where, body, signal) {
    const url = `${this.#config.url.replace(/\/+$/, "")}${where}`;
    const payload = JSON.stringify(body);
    const headers = {
      authorization: `Bearer ${this.#config.token}`,
      "content-type": "application/json",
      "content-length": Buffer.byteLength(payload),
    };
    return new Promise((resolve, reject) => {
      const { request } = url.startsWith("https:") ? https : http;
      const sent = request(url, { method, headers, signal, timeout: SILENCE }, (answer) => {
        let text = "";
        answer.setEncoding("utf8");
        answer.on("data", (part) => {
          text = (text + part).trimStart();
        });
        answer.on("end", () => resolve({ status: answer.statusCode, text }));
        answer.on("error", (error) => {
          reject(Object.assign(error, { accepted: answer.statusCode === 200 }));
        });
      });
      sent.on("timeout", () => sent.destroy(new Error(`silent for ${SILENCE / 1000} s`)));
      sent.on("error", reject);
      sent.end(payload);
    });
  }
}

// The adapter says no, and repeating would not change that.
class Refused extends Error {}

function path(call) {
  return `/v1/calls/${encodeURIComponent(call)}`;
}

function isTransient(status) {
  return status >= 500 || status === 408 || status === 429;
}

function parse(text) {
  try {
    const value = JSON.parse(text);
    return typeof value === "object" ? value : undefined;
  } catch {
    return undefined;
  }
}

function explain({ status, text }) {
  const setting = "plugins.entries.askbus.config";
  const message = parse(text)?.error?.message;
  if (status === 401) {
    return `gateway-adapter refuses the token: set ${setting}.token to its adapter.http.token`;
  }
  if (message) return message;
  return `HTTP ${status} from gateway-adapter: check ${setting}.url`;
}
