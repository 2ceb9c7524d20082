// One call of the Gateway, as another of its operators: prints the result as JSON.
// usage: GATEWAY_URL=… GATEWAY_TOKEN=… node gateway_call.mjs METHOD PARAMS
const [method, params] = process.argv.slice(2);
const socket = new WebSocket(process.env.GATEWAY_URL);
const send = (id, method, params) => socket.send(JSON.stringify({ type: "req", id, method, params }));

function fail(why) {
  console.error(`${method}: ${why}`);
  process.exit(1);
}

socket.onerror = () => fail(`no connection to ${process.env.GATEWAY_URL}`);
socket.onclose = ({ code, reason }) => fail(`closed with ${code} ${reason}`);
socket.onmessage = ({ data }) => {
  const frame = JSON.parse(data);
  if (frame.event === "connect.challenge") {
    send("connect", "connect", {
      minProtocol: 4,
      maxProtocol: 4,
      client: { id: "gateway-client", mode: "backend", version: "0", platform: "linux" },
      role: "operator",
      scopes: ["operator.read", "operator.write", "operator.questions"],
      auth: { token: process.env.GATEWAY_TOKEN },
    });
  } else if (frame.type === "res" && !frame.ok) {
    fail(JSON.stringify(frame.error));
  } else if (frame.id === "connect") {
    send("call", method, JSON.parse(params));
  } else if (frame.id === "call") {
    process.stdout.write(JSON.stringify(frame.payload), () => process.exit(0));
  }
};
