// Secret answers: OpenClaw sees and stores a handle; the value is put in on the way to the model
// and to tools, and taken out on the way back. Values live in memory only.
import { randomUUID } from "node:crypto";

const HANDLE = /\[askbus-secret:([0-9a-f-]{36})\]/g;
// Shorter values are part of too many other texts to be taken out of them.
const SHORTEST_HIDDEN = 4;

// OpenClaw loads this module several times in one process, so what must be shared sits here.
const held = (globalThis[Symbol.for("askbus.secrets")] ??= new Map());

export class Secrets {
  #keepMs;

  constructor(keepMs) {
    this.#keepMs = keepMs;
  }

  // Holds a value for a session; returns its handle.
  keep(value, sessionKey) {
    const id = randomUUID();
    const secret = { value, sessionKey };
    held.set(id, secret);
    this.#used(id, secret);
    return `[askbus-secret:${id}]`;
  }

  #used(id, secret) {
    clearTimeout(secret.expiry);
    secret.expiry = setTimeout(() => held.delete(id), this.#keepMs).unref();
  }

  // Puts values in place of handles; with a session only that session's.
  reveal(text, sessionKey) {
    return text.replace(HANDLE, (handle, id) => {
      const secret = held.get(id);
      if (!secret || (sessionKey && secret.sessionKey !== sessionKey)) return handle;
      this.#used(id, secret);
      return secret.value;
    });
  }

  // Puts handles in place of values, the longest first: one value may be a part of another.
  hide(text) {
    const found = [...held].filter(
      ([, { value }]) => value.length >= SHORTEST_HIDDEN && text.includes(value),
    );
    found.sort(([, one], [, other]) => other.value.length - one.value.length);
    for (const [id, { value }] of found) {
      text = text.replaceAll(value, () => `[askbus-secret:${id}]`);
    }
    return text;
  }

  // The same for every string in a JSON value; what needs no change comes back as it is.
  revealIn(value, sessionKey) {
    return held.size === 0 ? value : mapText(value, (text) => this.reveal(text, sessionKey));
  }

  hideIn(value) {
    return held.size === 0 ? value : mapText(value, (text) => this.hide(text));
  }

  // Drops the values of a session that is over.
  forget(sessionKey) {
    for (const [id, secret] of held) {
      if (secret.sessionKey !== sessionKey) continue;
      clearTimeout(secret.expiry);
      held.delete(id);
    }
  }
}

// A pattern for api.registerTextTransforms that rewrites by a function: the values to take out
// are not known when it is registered.
export class Rewrite extends RegExp {
  #rewrite;

  constructor(rewrite) {
    super("");
    this.#rewrite = rewrite;
  }

  [Symbol.replace](text) {
    return this.#rewrite(text);
  }
}

// What other plugins put into a result need not be a tree.
const DEEPEST = 32;

function mapText(value, rewrite, depth = 0) {
  if (typeof value === "string") return rewrite(value);
  if (value === null || typeof value !== "object" || depth === DEEPEST) return value;
  if (Array.isArray(value)) {
    const items = value.map((item) => mapText(item, rewrite, depth + 1));
    return items.some((item, at) => item !== value[at]) ? items : value;
  }
  const entries = Object.entries(value);
  const mapped = entries.map(([key, item]) => [key, mapText(item, rewrite, depth + 1)]);
  return mapped.some(([, item], at) => item !== entries[at][1]) ? Object.fromEntries(mapped) : value;
}
