// The tool request_user_input. A call waits at gateway-adapter, which holds its whole state; here
// it is only carried, so a restart of askbus is waited out and loses nothing.
import { randomUUID } from "node:crypto";
import { Adapter } from "./adapter.js";
import { Rewrite, Secrets } from "./secrets.js";

const TOOL = "request_user_input";
const RUNS_KEPT = 1000;

// These store their arguments where people and other agents read them: a handle stays a handle.
const WRITES_TRANSCRIPTS = new Set([TOOL, "ask_user", "message", "sessions_send", "sessions_spawn"]);

const parameters = {
  type: "object",
  properties: {
    question: {
      type: "string",
      description: "The question to ask the user. Clear, specific, one question.",
    },
    choices: {
      type: "array",
      items: { type: "string" },
      description:
        "Optional list of predefined choices. The user can pick one or type a custom answer.",
    },
    secret: {
      type: "boolean",
      description:
        "If true, the input should not be echoed visually. Use for passwords or sensitive values.",
    },
  },
  required: ["question"],
};

// OpenClaw loads this module several times in one process, so what must be shared sits here.
const runs = (globalThis[Symbol.for("askbus.runs")] ??= new Map());

// The tool itself is not told its run; the hook that comes before it is.
function rememberRun(sessionKey, toolCallId, runId) {
  const key = JSON.stringify([sessionKey, toolCallId]);
  runs.delete(key);
  runs.set(key, runId);
  if (runs.size > RUNS_KEPT) runs.delete(runs.keys().next().value);
}

function runOf(sessionKey, toolCallId) {
  return runs.get(JSON.stringify([sessionKey, toolCallId]));
}

export default {
  id: "askbus",
  name: "askbus",
  description: "Tool request_user_input: the agent asks, a person answers wherever they are",

  register(api) {
    const config = api.pluginConfig ?? {};
    const adapter = new Adapter(config, api.logger);
    const secrets = new Secrets((config.secretMinutes ?? 60) * 60_000);

    api.registerTool(
      (context) => ({
        name: TOOL,
        label: "Ask the user",
        description: "Ask the user a question. Returns their answer as a string.",
        parameters,
        // Without it, tool search hides the tool from the model.
        catalogMode: "direct-only",
        execute: (toolCallId, args, signal, onUpdate) => {
          onUpdate?.({ content: [{ type: "text", text: "waiting for the user" }], details: {} });
          return ask({ adapter, secrets, gateway: config.gateway }, context, toolCallId, args, signal);
        },
      }),
      { name: TOOL },
    );

    api.on("before_tool_call", (event, context) => {
      const toolCallId = event.toolCallId ?? context.toolCallId;
      if (event.toolName === TOOL) {
        rememberRun(context.sessionKey, toolCallId, event.runId ?? context.runId);
      }
      if (WRITES_TRANSCRIPTS.has(event.toolName)) return undefined;
      const params = secrets.revealIn(event.params, context.sessionKey);
      return params === event.params ? undefined : { params };
    });

    // On its way to the model a handle becomes the value, on its way back the value a handle.
    const revealed = new Rewrite((text) => secrets.reveal(text));
    const hidden = new Rewrite((text) => secrets.hide(text));
    api.registerTextTransforms({
      input: [{ from: revealed, to: "" }],
      output: [{ from: hidden, to: "" }],
    });
    api.registerAgentToolResultMiddleware?.(
      (event) => {
        const result = secrets.hideIn(event.result);
        return result === event.result ? undefined : { result };
      },
      { runtimes: ["openclaw"] },
    );
    api.on("before_message_write", (event) => {
      const message = secrets.hideIn(event.message);
      return message === event.message ? undefined : { message };
    });
    api.on("session_end", (event, context) => {
      // After a compaction the conversation goes on.
      if (event.reason !== "compaction") secrets.forget(event.sessionKey ?? context.sessionKey);
    });
  },
};

async function ask({ adapter, secrets, gateway }, context, toolCallId, args, signal) {
  const { sessionKey, sessionId, agentId } = context;
  if (!sessionKey) throw new Error("request_user_input needs a session; this run has none");
  // Providers repeat tool call ids; one execution keeps its id over all retries.
  const call = `${toolCallId}.${randomUUID()}`;
  const who = { gateway, sessionKey, runId: runOf(sessionKey, toolCallId) ?? call };
  const body = { ...who, sessionId, agentId, toolCallId, args, handles: true };
  let outcome;
  try {
    outcome = await adapter.open(call, body, signal);
  } catch (error) {
    if (signal?.aborted) adapter.cancel(call, { ...who, reason: String(signal.reason) });
    throw error;
  }
  // From here on the value is held, so that the acknowledgement is true.
  const text = outcome.secret ? secrets.keep(outcome.secret.value, sessionKey) : outcome.text;
  adapter.acknowledge(call, { ...who, revision: outcome.revision });
  if (outcome.isError) throw new Error(text);
  return { content: [{ type: "text", text }], details: outcome.details ?? {} };
}
