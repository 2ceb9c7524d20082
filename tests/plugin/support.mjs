// What the plugin's tests need: the real Gateway, a scripted model, a scripted adapter.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { randomUUID } from "node:crypto";
import { createWriteStream } from "node:fs";
import { mkdtemp, mkdir, readFile, readdir, rm, writeFile } from "node:fs/promises";
import http from "node:http";
import net from "node:net";
import os from "node:os";
import path from "node:path";
import { setTimeout as sleep } from "node:timers/promises";

const PATIENCE = 180_000;
const START_TIMEOUT = 300_000;
const TOKEN = "plugin-test-gateway-token";
export const ADAPTER_TOKEN = "plugin-test-adapter-token";

export async function until(what, check) {
  const deadline = Date.now() + PATIENCE;
  for (;;) {
    const found = await check();
    if (found) return found;
    assert.ok(Date.now() < deadline, `not seen: ${what}`);
    await sleep(20);
  }
}

// An HTTP server that can go away and come back on its port.
class Server {
  #handle;
  #server;
  port = 0;

  constructor(handle) {
    this.#handle = handle;
  }

  async start() {
    this.#server = http.createServer((request, response) => {
      let body = "";
      request.on("data", (part) => (body += part));
      request.on("end", () => this.#handle(request, body, response));
    });
    await new Promise((done) => this.#server.listen(this.port, "127.0.0.1", done));
    this.port = this.#server.address().port;
  }

  async stop() {
    const closed = new Promise((done) => this.#server.close(done));
    this.#server.closeAllConnections();
    await closed;
  }

  get url() {
    return `http://127.0.0.1:${this.port}`;
  }
}

// gateway-adapter as the plugin sees it. Each request is kept; a test answers it.
export class Adapter extends Server {
  requests = [];
  // Statuses with which the next requests of a method are refused.
  refuse = { POST: [], DELETE: [], ACK: [] };

  constructor() {
    super((request, body, response) => this.#handle(request, body, response));
  }

  #handle(request, body, response) {
    const [, call, ack] = /^\/v1\/calls\/([^/]+)(\/ack)?$/.exec(request.url);
    const kind = ack ? "ACK" : request.method;
    const seen = {
      kind,
      call: decodeURIComponent(call),
      body: JSON.parse(body),
      token: request.headers.authorization,
      open: true,
    };
    this.requests.push(seen);
    response.on("close", () => (seen.open = false));
    const refusal = this.refuse[kind].shift();
    if (refusal) {
      response.writeHead(refusal.status);
      response.end(JSON.stringify({ error: { code: "x", message: refusal.message } }));
    } else if (kind === "POST") {
      response.writeHead(200, { "content-type": "application/json" });
      response.write("\n");
      seen.end = (text) => response.end(text);
      seen.cut = () => response.destroy();
    } else {
      response.writeHead(204).end();
    }
  }

  of(kind, matches = () => true) {
    return this.requests.filter((request) => request.kind === kind && matches(request));
  }

  // The call that waits for the answer to this question.
  async waiting(question, count = 1) {
    const open = () =>
      this.of("POST", (r) => r.body.args.question === question && r.end && r.open);
    const all = await until(`${count} open: ${question}`, () => open().length >= count && open());
    return count === 1 ? all[0] : all;
  }
}

export function answered(text, revision = 2) {
  const details = { status: "answered", question: "q", answers: { answer: [text] } };
  return JSON.stringify({ revision, text, isError: false, details });
}

// An OpenAI-compatible provider. A user message holds `DO {json} END`: a list of rounds, each a list of
// `{tool, args, id?}`; `$SAID` in an argument is what the last tool said. Then it repeats what the
// tools said, in pieces of three characters.
export class Model extends Server {
  requests = [];

  constructor() {
    super((request, body, response) => this.#handle(request, body, response));
  }

  #handle(_request, body, response) {
    const request = JSON.parse(body);
    this.requests.push(request);
    const messages = request.messages;
    const at = messages.findLastIndex((m) => m.role === "user" && script(content(m)));
    const since = messages.slice(at + 1);
    const said = since.filter((m) => m.role === "tool").map(content);
    const done = since.filter((m) => m.tool_calls?.length).length;
    const rounds = at < 0 ? [] : script(content(messages[at]));
    const chunk = (delta, finish_reason = null) =>
      response.write(
        `data: ${JSON.stringify({
          id: "c",
          object: "chat.completion.chunk",
          created: 0,
          model: request.model,
          choices: [{ index: 0, delta, finish_reason }],
        })}\n\n`,
      );
    response.writeHead(200, { "content-type": "text/event-stream" });
    chunk({ role: "assistant", content: "" });
    if (done < rounds.length) {
      rounds[done].forEach(({ tool, args, id }, index) => {
        const json = JSON.stringify(args).replace("$SAID", said.at(-1));
        chunk({
          tool_calls: [
            {
              index,
              id: id ?? `call_${randomUUID().slice(0, 8)}`,
              type: "function",
              function: { name: tool, arguments: json },
            },
          ],
        });
      });
      chunk({}, "tool_calls");
    } else {
      const text = said.length ? `tools said: ${said.join(" | ")}` : "nothing to do";
      for (const piece of text.match(/.{1,3}/gs)) chunk({ content: piece });
      chunk({}, "stop");
    }
    response.end("data: [DONE]\n\n");
  }
}

// The rounds that a text names. OpenClaw also quotes texts, and cuts them: those name none.
function script(text) {
  try {
    return JSON.parse(/DO (\[.*\]) END/s.exec(text)[1]);
  } catch {
    return undefined;
  }
}

export function content(message) {
  if (typeof message.content === "string") return message.content;
  return (message.content ?? []).map((part) => part.text ?? "").join("");
}

// The real Gateway with the plugin under test and the probe; state in a new folder.
export class Gateway {
  static async start({ adapter, model, probe }) {
    const install = process.env.ASKBUS_OPENCLAW;
    assert.ok(install, "ASKBUS_OPENCLAW is not set: run ./dev e2e");
    const gateway = new Gateway();
    gateway.folder = await mkdtemp(path.join(os.tmpdir(), "askbus-plugin-test-"));
    gateway.port = await freePort();
    const tests = import.meta.dirname;
    const at = (name) => path.join(gateway.folder, name);
    await mkdir(at("home"));
    const config = {
      gateway: {
        mode: "local",
        port: gateway.port,
        bind: "loopback",
        auth: { mode: "token", token: TOKEN },
      },
      models: {
        mode: "replace",
        providers: {
          scripted: {
            baseUrl: `${model.url}/v1`,
            apiKey: "x",
            api: "openai-completions",
            models: [
              {
                id: "scripted-1",
                name: "Scripted",
                reasoning: false,
                input: ["text"],
                cost: { input: 0, output: 0, cacheRead: 0, cacheWrite: 0 },
                contextWindow: 128_000,
                maxTokens: 8000,
              },
            ],
          },
        },
      },
      agents: { defaults: { workspace: at("workspace"), model: { primary: "scripted/scripted-1" } } },
      plugins: {
        load: { paths: [path.join(tests, "../../deploy/openclaw"), path.join(tests, "probe")] },
        entries: {
          askbus: {
            enabled: true,
            config: { url: adapter.url, token: "${ASKBUS_TOKEN}", gateway: "lab" },
          },
          "askbus-probe": { enabled: true, config: { url: probe.url } },
        },
      },
    };
    await writeFile(at("openclaw.json"), JSON.stringify(config));
    gateway.log = createWriteStream(at("gateway.log"));
    const script = install.endsWith(".mjs")
      ? install
      : path.join(install, "app/node_modules/openclaw/openclaw.mjs");
    const run = ["gateway", "run", "--port", String(gateway.port), "--bind", "loopback"];
    const env = {
      ...process.env,
      HOME: at("home"),
      OPENCLAW_STATE_DIR: at("state"),
      OPENCLAW_CONFIG_PATH: at("openclaw.json"),
      OPENCLAW_SKIP_CHANNELS: "1",
      OPENCLAW_DISABLE_BONJOUR: "1",
      ASKBUS_TOKEN: ADAPTER_TOKEN,
    };
    const deadline = Date.now() + START_TIMEOUT;
    const launch = () => {
      gateway.child = spawn(process.execPath, [script, ...run], { env });
      gateway.child.stdout.pipe(gateway.log, { end: false });
      gateway.child.stderr.pipe(gateway.log, { end: false });
    };
    launch();
    for (;;) {
      const client = await gateway.connect().catch(() => undefined);
      if (client) {
        client.close();
        return gateway;
      }
      assert.ok(Date.now() < deadline, `gateway is not ready; see ${at("gateway.log")}`);
      // It gives itself up when a busy machine lets it wait; a supervisor would start it again.
      // Half a first start may leave a state that wants a repair by hand.
      if (gateway.child.exitCode !== null) {
        await rm(at("state"), { recursive: true, force: true });
        launch();
      }
      await sleep(200);
    }
  }

  connect() {
    return Client.connect(this.port);
  }

  async stop() {
    const exited = new Promise((done) => this.child.once("exit", done));
    this.child.kill("SIGKILL");
    await exited;
    await rm(this.folder, { recursive: true, force: true });
  }

  // Files below the state folder, and logs, that hold a text.
  async filesWith(text) {
    const found = [];
    for (const entry of await readdir(this.folder, { recursive: true, withFileTypes: true })) {
      if (!entry.isFile()) continue;
      const file = path.join(entry.parentPath, entry.name);
      // A running Gateway removes files of its own meanwhile.
      const content = await readFile(file).catch((error) => {
        if (error.code !== "ENOENT") throw error;
        return "";
      });
      if (content.includes(text)) found.push(file);
    }
    return found;
  }
}

// An operator of the Gateway.
class Client {
  frames = [];
  #socket;
  #pending = new Map();

  static connect(port) {
    const client = new Client();
    const socket = new WebSocket(`ws://127.0.0.1:${port}`);
    client.#socket = socket;
    return new Promise((resolve, reject) => {
      socket.onerror = () => reject(new Error("no connection"));
      socket.onclose = () => reject(new Error("closed"));
      socket.onmessage = ({ data }) => {
        const frame = JSON.parse(data);
        client.frames.push(frame);
        if (frame.event === "connect.challenge") {
          const params = {
            minProtocol: 4,
            maxProtocol: 4,
            client: { id: "gateway-client", mode: "backend", version: "0", platform: "linux" },
            role: "operator",
            scopes: ["operator.read", "operator.write", "operator.questions"],
            caps: ["tool-events"],
            auth: { token: TOKEN },
          };
          client.request("connect", params).then(() => resolve(client), reject);
        } else if (frame.type === "res") {
          const { done, fail } = client.#pending.get(frame.id);
          frame.ok ? done(frame.payload) : fail(new Error(frame.error.message));
        }
      };
    });
  }

  request(method, params) {
    const id = randomUUID();
    this.#socket.send(JSON.stringify({ type: "req", id, method, params }));
    return new Promise((done, fail) => this.#pending.set(id, { done, fail }));
  }

  close() {
    this.#socket.close();
  }

  // Starts a run that does these rounds; returns its id.
  async run(sessionKey, rounds) {
    const message = `DO ${JSON.stringify(rounds)} END`;
    const idempotencyKey = randomUUID();
    await this.request("chat.send", { sessionKey, message, idempotencyKey });
    return idempotencyKey;
  }

  // The last `chat` event of a run.
  end(run) {
    const isEnd = ({ event, payload }) =>
      event === "chat" &&
      payload.runId === run &&
      ["final", "aborted", "error"].includes(payload.state);
    return until(`end of run ${run}`, () => this.frames.find(isEnd)?.payload);
  }

  async endText(run) {
    const { state, message } = await this.end(run);
    assert.equal(state, "final");
    return content(message);
  }
}

async function freePort() {
  const server = net.createServer();
  await new Promise((done) => server.listen(0, "127.0.0.1", done));
  const { port } = server.address();
  await new Promise((done) => server.close(done));
  return port;
}
