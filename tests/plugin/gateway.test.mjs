// The plugin in the real Gateway.
import assert from "node:assert/strict";
import http from "node:http";
import { after, before, describe, test } from "node:test";
import { ADAPTER_TOKEN, Adapter, Gateway, Model, answered, content, until } from "./support.mjs";

const TOOL = "request_user_input";
const CANARY = "Canary-7Q4x-55f1-9Zt";

let adapter, model, gateway, client, probe;
const sunk = [];
let sessions = 0;

function newSession() {
  sessions += 1;
  return `agent:main:plugin-${sessions}`;
}

function asks(question, more = {}) {
  const { id, ...args } = more;
  return { tool: TOOL, id, args: { question, ...args } };
}

const skip = process.env.ASKBUS_OPENCLAW ? false : "needs the real Gateway: ./dev e2e";

describe("plugin in the real Gateway", { skip }, () => {
  before(async () => {
    adapter = new Adapter();
    model = new Model();
    await Promise.all([adapter.start(), model.start()]);
    probe = http.createServer((request, response) => {
      request.on("data", (part) => sunk.push(String(part)));
      request.on("end", () => response.end());
    });
    await new Promise((done) => probe.listen(0, "127.0.0.1", done));
    const probeUrl = `http://127.0.0.1:${probe.address().port}`;
    gateway = await Gateway.start({ adapter, model, probe: { url: probeUrl } });
    client = await gateway.connect();
  });

  after(async () => {
    client?.close();
    await gateway?.stop();
    await Promise.all([adapter?.stop(), model?.stop()]);
    probe?.close();
  });

  test("the model sees the tool with the specification's schema, also with tool search on", async () => {
    await client.endText(await client.run(newSession(), []));
    const offered = model.requests.at(-1).tools.map((tool) => tool.function);
    assert.ok(offered.some((tool) => tool.name === "tool_search"));
    const tool = offered.find((tool) => tool.name === TOOL);
    assert.deepEqual(Object.keys(tool.parameters.properties), ["question", "choices", "secret"]);
    assert.deepEqual(tool.parameters.required, ["question"]);
  });

  test("a call carries who asks, and its answer becomes the tool's result", async () => {
    const session = newSession();
    const run = await client.run(session, [[asks("Where to?", { choices: ["A", "B"] })]]);
    const call = await adapter.waiting("Where to?");
    assert.equal(call.token, `Bearer ${ADAPTER_TOKEN}`);
    const { sessionId, toolCallId, ...body } = call.body;
    assert.deepEqual(body, {
      gateway: "lab",
      sessionKey: session,
      runId: run,
      agentId: "main",
      args: { question: "Where to?", choices: ["A", "B"] },
      handles: true,
    });
    assert.match(sessionId, /./);
    assert.match(call.call, new RegExp(`^${toolCallId}\\.[0-9a-f-]{36}$`));
    call.end(answered("B", 17));
    assert.equal(await client.endText(run), "tools said: B");
    const [ack] = await until("ack", () => {
      const acks = adapter.of("ACK", (r) => r.call === call.call);
      return acks.length && acks;
    });
    assert.deepEqual(ack.body, { gateway: "lab", sessionKey: session, runId: run, revision: 17 });
  });

  test("a call is repeated with its id until the adapter is back", async () => {
    const run = await client.run(newSession(), [[asks("Still there?")]]);
    const first = await adapter.waiting("Still there?");
    await adapter.stop();
    await until("the plugin notices", () => !first.open);
    await adapter.start();
    const second = await adapter.waiting("Still there?");
    assert.equal(second.call, first.call);
    assert.deepEqual(second.body, first.body);
    second.end(answered("yes"));
    assert.equal(await client.endText(run), "tools said: yes");
  });

  test("an answer that is cut off, a stopping replica and a 503 are not outcomes", async () => {
    const run = await client.run(newSession(), [[asks("Whole?")]]);
    const ids = new Set();
    const repeats = [
      (call) => call.end(""),
      (call) => call.end('{"revision":3,"text":"ha'),
      (call) => call.end('{"retry":true,"reason":"stopping"}'),
      (call) => {
        adapter.refuse.POST.push({ status: 503 });
        call.cut();
      },
    ];
    for (const repeat of repeats) {
      const call = await adapter.waiting("Whole?");
      ids.add(call.call);
      repeat(call);
      await until("the end of this try", () => !call.open);
    }
    const last = await adapter.waiting("Whole?");
    last.end(answered("whole"));
    assert.equal(await client.endText(run), "tools said: whole");
    assert.deepEqual([...ids], [last.call]);
  });

  test("an acknowledgement is repeated until it is taken", async () => {
    adapter.refuse.ACK.push({ status: 503 }, { status: 500 });
    const run = await client.run(newSession(), [[asks("Ack?")]]);
    const call = await adapter.waiting("Ack?");
    call.end(answered("done", 5));
    assert.equal(await client.endText(run), "tools said: done");
    const acks = () => adapter.of("ACK", (r) => r.call === call.call && r.body.revision === 5);
    await until("three acks", () => acks().length === 3);
  });

  test("an abort is told to the adapter until it takes it", async () => {
    adapter.refuse.DELETE.push({ status: 503 });
    const session = newSession();
    const run = await client.run(session, [[asks("Abort me?")]]);
    const call = await adapter.waiting("Abort me?");
    await client.request("chat.abort", { sessionKey: session, runId: run });
    assert.equal((await client.end(run)).state, "aborted");
    const cancels = () => adapter.of("DELETE", (r) => r.call === call.call);
    await until("two cancels", () => cancels().length === 2);
    const { reason, ...who } = cancels()[1].body;
    assert.deepEqual(who, { gateway: "lab", sessionKey: session, runId: run });
    assert.match(reason, /abort/i);
    assert.equal(adapter.of("ACK", (r) => r.call === call.call).length, 0);
  });

  test("an abort while the adapter is away is told when it is back", async () => {
    const session = newSession();
    const run = await client.run(session, [[asks("Abort in the dark?")]]);
    const call = await adapter.waiting("Abort in the dark?");
    await adapter.stop();
    await client.request("chat.abort", { sessionKey: session, runId: run });
    await client.end(run);
    await adapter.start();
    await until("cancel", () => adapter.of("DELETE", (r) => r.call === call.call).length === 1);
  });

  test("two calls of one turn wait side by side", async () => {
    const run = await client.run(newSession(), [[asks("First?"), asks("Second?")]]);
    const [first, second] = [await adapter.waiting("First?"), await adapter.waiting("Second?")];
    assert.equal(first.body.runId, second.body.runId);
    second.end(answered("two"));
    first.end(answered("one"));
    assert.equal(await client.endText(run), "tools said: one | two");
  });

  test("repeated tool call ids stay calls of their own", async () => {
    const [one, other] = [newSession(), newSession()];
    const same = (question) => asks(question, { id: "call_fixed" });
    const runOne = await client.run(one, [[same("Same 1?")], [same("Same 2?")]]);
    const first = await adapter.waiting("Same 1?");
    const runOther = await client.run(other, [[same("Same 3?")]]);
    const third = await adapter.waiting("Same 3?");
    first.end(answered("1"));
    const second = await adapter.waiting("Same 2?");
    second.end(answered("2"));
    third.end(answered("3"));
    assert.equal(await client.endText(runOne), "tools said: 1 | 2");
    assert.equal(await client.endText(runOther), "tools said: 3");
    assert.equal(new Set([first.call, second.call, third.call]).size, 3);
    assert.deepEqual([second.body.runId, third.body.runId], [runOne, runOther]);
  });

  test("what can't be asked is told to the model, a wrong token to the operator", async () => {
    for (const [status, message, expected] of [
      [400, "question: 5000 characters, at most 4000", /question: 5000 characters, at most 4000/],
      [401, "no", /plugins\.entries\.askbus\.config\.token/],
      [409, "call_id_reused", /call_id_reused/],
    ]) {
      adapter.refuse.POST.push({ status, message });
      const run = await client.run(newSession(), [[asks(`Refused ${status}?`)]]);
      assert.match(await client.endText(run), expected);
      const tries = adapter.of("POST", (r) => r.body.args.question === `Refused ${status}?`);
      assert.equal(tries.length, 1);
    }
  });

  test("a sub-agent asks from its own session", async () => {
    const task = `DO ${JSON.stringify([[asks("Sub?")]])} END`;
    const spawn = { tool: "tool_call", args: { id: "sessions_spawn", args: { task } } };
    const run = await client.run(newSession(), [[spawn]]);
    const call = await adapter.waiting("Sub?");
    assert.match(call.body.sessionKey, /^agent:main:subagent:/);
    assert.notEqual(call.body.runId, run);
    call.end(answered("deep"));
    const { sessionKey } = call.body;
    await until("the answer in the sub-agent's session", async () => {
      const history = await client.request("chat.history", { sessionKey, limit: 50 });
      return JSON.stringify(history).includes("tools said: deep");
    });
  });

  test("no answer reaches the model as the adapter words it", async () => {
    const run = await client.run(newSession(), [[asks("Anybody?")]]);
    const text = '{"error":"User did not respond","outcome":{"status":"expired"}}';
    const call = await adapter.waiting("Anybody?");
    call.end(JSON.stringify({ revision: 3, text, isError: false, details: { status: "expired" } }));
    assert.equal(await client.endText(run), `tools said: ${text}`);
  });

  test("a secret reaches the model and later tools, and nobody else", async () => {
    const session = newSession();
    const watcher = await gateway.connect();
    await watcher.request("sessions.subscribe", {});
    const before = model.requests.length;
    const run = await client.run(session, [
      [asks("Password?", { secret: true })],
      [{ tool: "probe_sink", args: { value: "$SAID" } }],
    ]);
    const call = await adapter.waiting("Password?");
    const details = { status: "answered", question: "q" };
    const secret = { value: CANARY };
    call.end(JSON.stringify({ revision: 4, text: "answered (hidden)", isError: false, details, secret }));
    const end = await client.endText(run);

    const told = model.requests.slice(before).flatMap((request) => request.messages);
    const results = told.filter((m) => m.role === "tool").map(content);
    assert.ok(results.includes(CANARY), "the model has the value");
    assert.ok(results.includes(`sink got ${CANARY}`), "also from a later tool");
    assert.deepEqual(sunk, [CANARY], "a later tool has the value");

    assert.match(end, /\[askbus-secret:[0-9a-f-]{36}\]/);
    assert.ok(!end.includes(CANARY));
    const history = await client.request("chat.history", { sessionKey: session, limit: 100 });
    assert.ok(!JSON.stringify(history).includes(CANARY), "history");
    await until("the watcher's final", () =>
      watcher.frames.some(({ payload }) => payload?.runId === run && payload.state === "final"),
    );
    for (const frame of [...client.frames, ...watcher.frames]) {
      // OpenClaw rewrites each streamed piece alone, so a value that the model repeats in pieces
      // passes through until the text is complete.
      const { stream, state } = frame.payload ?? {};
      const streamed = stream === "assistant" || state === "delta";
      if (!streamed) assert.ok(!JSON.stringify(frame).includes(CANARY), JSON.stringify(frame));
    }

    // The next turn still knows it, from the handle in the transcript.
    await client.endText(await client.run(session, []));
    assert.ok(JSON.stringify(model.requests.at(-1).messages).includes(CANARY), "next turn");
    assert.deepEqual(await gateway.filesWith(CANARY), [], "state and logs");
  });

  test("a handle is worth nothing in another session's tools", async () => {
    const session = newSession();
    const run = await client.run(session, [[asks("Other password?", { secret: true })]]);
    const secret = { value: `${CANARY}-other` };
    const call = await adapter.waiting("Other password?");
    call.end(JSON.stringify({ revision: 4, text: "answered (hidden)", details: {}, secret }));
    const [handle] = /\[askbus-secret:[^\]]+\]/.exec(await client.endText(run));
    const before = sunk.length;
    const theft = [[{ tool: "probe_sink", args: { value: handle } }]];
    await client.endText(await client.run(newSession(), theft));
    assert.deepEqual(sunk.slice(before), [handle]);
  });
});
