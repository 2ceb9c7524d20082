import assert from "node:assert/strict";
import { test } from "node:test";
import { Rewrite, Secrets } from "../../deploy/openclaw/secrets.js";

const HOUR = 3_600_000;

test("a handle becomes its value again, in its own session only", () => {
  const secrets = new Secrets(HOUR);
  const handle = secrets.keep("hunter22", "s1");
  assert.match(handle, /^\[askbus-secret:[0-9a-f-]{36}\]$/);
  assert.equal(secrets.reveal(`a ${handle} b ${handle}`, "s1"), "a hunter22 b hunter22");
  assert.equal(secrets.reveal(handle, "s2"), handle);
  assert.equal(secrets.reveal(handle), "hunter22", "on the way to the model");
  const unknown = "[askbus-secret:00000000-0000-4000-8000-000000000000]";
  assert.equal(secrets.reveal(unknown), unknown);
  secrets.forget("s1");
});

test("values are taken out literally, the longest first, the shortest not at all", () => {
  const secrets = new Secrets(HOUR);
  const part = secrets.keep("pass$&.*", "s1");
  const whole = secrets.keep("pass$&.*word", "s1");
  secrets.keep("abc", "s1");
  assert.equal(secrets.hide("x pass$&.*word pass$&.* y"), `x ${whole} ${part} y`);
  assert.equal(secrets.hide("abcdef"), "abcdef");
  secrets.forget("s1");
});

test("a value whose text looks like a replacement pattern comes back as it is", () => {
  const secrets = new Secrets(HOUR);
  const value = "$& $1 $$ [askbus-secret:x]";
  assert.equal(secrets.reveal(secrets.keep(value, "s1"), "s1"), value);
  secrets.forget("s1");
});

test("a session that is over takes its values with it", () => {
  const secrets = new Secrets(HOUR);
  const gone = secrets.keep("value-one", "s1");
  const kept = secrets.keep("value-two", "s2");
  secrets.forget("s1");
  assert.equal(secrets.reveal(gone), gone);
  assert.equal(secrets.reveal(kept), "value-two");
  assert.equal(secrets.hide("value-one"), "value-one");
  secrets.forget("s2");
});

test("a value is dropped some time after its last use", (t) => {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  const secrets = new Secrets(HOUR);
  const handle = secrets.keep("hunter22", "s1");
  t.mock.timers.tick(HOUR - 1);
  assert.equal(secrets.reveal(handle), "hunter22");
  t.mock.timers.tick(HOUR - 1);
  assert.equal(secrets.reveal(handle), "hunter22", "used in between");
  t.mock.timers.tick(HOUR);
  assert.equal(secrets.reveal(handle), handle);
});

test("every string of a JSON value is rewritten, and what needs nothing stays the same object", () => {
  const secrets = new Secrets(HOUR);
  const handle = secrets.keep("hunter22", "s1");
  const inside = { n: 1, list: ["x hunter22", { deep: "hunter22" }], none: null };
  const hidden = { n: 1, list: [`x ${handle}`, { deep: handle }], none: null };
  assert.deepEqual(secrets.hideIn(inside), hidden);
  assert.deepEqual(secrets.revealIn(hidden, "s1"), inside);
  const clean = { a: ["b", { c: 1 }] };
  assert.equal(secrets.hideIn(clean), clean);
  const circle = { name: "hunter22" };
  circle.self = circle;
  assert.equal(secrets.hideIn(circle).name, handle);
  secrets.forget("s1");
});

test("a rewrite works wherever a pattern does", () => {
  const shout = new Rewrite((text) => text.toUpperCase());
  assert.ok(shout instanceof RegExp);
  assert.equal("quiet".replace(shout, ""), "QUIET");
});
