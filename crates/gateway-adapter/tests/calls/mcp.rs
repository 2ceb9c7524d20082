//! MCP over raw HTTP, as clients of the revisions 2025-06-18 and 2025-11-25 send it.

use ask_core::entry::{Entry, Road, State, Verdict};
use ask_core::outcome::{CancelReason, Outcome, Returned};
use ask_core::reply::Answer;
use ask_core::time::Timestamp;
use reqwest::{Method, RequestBuilder, Response};
use serde_json::{Value, json};

use testkit::until;

use crate::bench::{Adapter, Bench, GATEWAY, SESSION, TOKEN};

const OPENCLAW: &str = "openclaw-bundle-mcp";
const OTHER: &str = "some-client";
const OTHER_SESSION: &str = "agent:main:owui-2";

/// One MCP session.
struct Client {
    id: String,
    revision: &'static str,
}

/// An answer that comes as events.
struct Events {
    response: Response,
    text: String,
}

#[derive(Debug, PartialEq)]
struct Event {
    id: String,
    retry: Option<String>,
    data: Option<String>,
}

impl Events {
    /// The next event; comments are passed over. `None` when the stream ends.
    async fn next(&mut self) -> Option<Event> {
        loop {
            while let Some((event, rest)) =
                self.text.split_once("\n\n").map(|(e, r)| (e.to_owned(), r.to_owned()))
            {
                self.text = rest;
                let field = |name: &str| {
                    event
                        .lines()
                        .find_map(|l| l.strip_prefix(name)?.strip_prefix(':'))
                        .map(|v| v.trim().to_owned())
                };
                if !event.starts_with(':') {
                    let id = field("id").unwrap_or_default();
                    return Some(Event { id, retry: field("retry"), data: field("data") });
                }
            }
            let part = self.response.chunk().await.ok().flatten()?;
            self.text.push_str(std::str::from_utf8(&part).unwrap());
        }
    }

    /// The JSON-RPC response at the end of the stream.
    async fn answer(&mut self) -> Value {
        loop {
            let event = self.next().await.expect("an answer before the stream ends");
            if let Some(data) = event.data.filter(|data| !data.is_empty()) {
                return serde_json::from_str(&data).unwrap();
            }
        }
    }
}

fn request(adapter: &Adapter, method: Method) -> RequestBuilder {
    testkit::http_client()
        .request(method, format!("{}/mcp", adapter.url))
        .bearer_auth(TOKEN)
        .header("accept", "application/json, text/event-stream")
}

impl Client {
    async fn start(adapter: &Adapter, name: &str) -> Self {
        Self::start_with(adapter, name, "2025-11-25").await
    }

    async fn start_with(adapter: &Adapter, name: &str, revision: &'static str) -> Self {
        let initialize = json!({
            "jsonrpc": "2.0", "id": 0, "method": "initialize",
            "params": {"protocolVersion": revision, "capabilities": {}, "clientInfo": {"name": name, "version": "1"}},
        });
        let response = request(adapter, Method::POST).json(&initialize).send().await.unwrap();
        let id = response.headers()["mcp-session-id"].to_str().unwrap().to_owned();
        let answer: Value = response.json().await.unwrap();
        assert_eq!(answer["result"]["protocolVersion"], revision);
        assert_eq!(answer["result"]["capabilities"], json!({"tools": {}}));
        let client = Self { id, revision };
        let ready = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
        assert_eq!(client.post(adapter, &ready).await.status(), 202);
        client
    }

    fn request(&self, adapter: &Adapter, method: Method) -> RequestBuilder {
        let request = request(adapter, method).header("mcp-session-id", &self.id);
        request.header("mcp-protocol-version", self.revision)
    }

    async fn post(&self, adapter: &Adapter, message: &Value) -> Response {
        self.request(adapter, Method::POST).json(message).send().await.unwrap()
    }

    async fn call(&self, adapter: &Adapter, id: Value, args: &Value) -> Events {
        let params = json!({"name": "request_user_input", "arguments": args});
        let call = json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params});
        Events { response: self.post(adapter, &call).await, text: String::new() }
    }

    async fn resume(&self, adapter: &Adapter, after: &str) -> Events {
        let request = self.request(adapter, Method::GET).header("last-event-id", after);
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), 200);
        Events { response, text: String::new() }
    }

    async fn cancel(&self, adapter: &Adapter, id: Value) {
        let params = json!({"requestId": id, "reason": "timeout"});
        let cancel = json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params});
        assert_eq!(self.post(adapter, &cancel).await.status(), 202);
    }

    /// The session of a client that speaks for none of the Gateway's.
    fn own_session(&self) -> String {
        format!("mcp-{}", self.id)
    }
}

fn choices() -> Value {
    json!({"question": "Where to?", "choices": ["A", "B"]})
}

fn text(answer: &Value) -> &str {
    answer["result"]["content"][0]["text"].as_str().unwrap()
}

async fn pending(bench: &Bench, session: &str) -> Entry {
    bench.question(session, |e| e.is_pending()).await.value
}

/// Makes `client` known as the one that speaks for [`SESSION`].
async fn introduce(bench: &Bench, adapter: &Adapter, client: &Client) {
    let args = json!({"question": "Ready?"});
    bench.tool_start(SESSION, "run-0", "call_0", &args).await;
    let mut events = client.call(adapter, json!(1), &args).await;
    let asked = pending(bench, SESSION).await;
    bench.answer(&asked, Answer::text("yes")).await;
    assert_eq!(text(&events.answer().await), "yes");
}

#[tokio::test]
async fn a_client_without_a_chat_is_answered_by_an_operator() {
    let bench = Bench::start().await;
    let adapter = bench.adapter().await;
    let client = Client::start(&adapter, OTHER).await;
    let mut events = client.call(&adapter, json!("a b"), &choices()).await;
    let first = events.next().await.unwrap();
    assert_eq!((first.retry.as_deref(), first.data.as_deref()), (Some("10000"), Some("")));
    let session = client.own_session();
    let asked = pending(&bench, &session).await;
    assert_eq!((asked.road, asked.key.run.as_str()), (Road::McpAlone, session.as_str()));
    bench.answer_as_operator(&asked, Answer::option(1)).await;
    let answer = events.answer().await;
    assert_eq!((text(&answer), &answer["id"]), ("B", &json!("a b")));
    assert_eq!(answer["result"]["structuredContent"]["status"], "answered");
    assert_eq!(answer["result"]["isError"], false);
    assert!(events.next().await.is_none());
    // It is known from now on as one without a session of the Gateway.
    let mut again = client.call(&adapter, json!(2), &json!({"question": "And when?"})).await;
    let asked = pending(&bench, &session).await;
    bench.answer_as_operator(&asked, Answer::text("now")).await;
    assert_eq!(text(&again.answer().await), "now");
}

#[tokio::test]
async fn a_call_of_the_gateway_is_bound_to_its_tool_call_in_both_orders() {
    let bench = Bench::start().await;
    let adapter = bench.adapter().await;
    let client = Client::start(&adapter, OPENCLAW).await;
    introduce(&bench, &adapter, &client).await;

    let mut events = client.call(&adapter, json!(2), &choices()).await;
    bench
        .tool_start(SESSION, "run-1", "call_1", &json!({"choices": ["A", "B"], "question": "Where to?"}))
        .await;
    let asked = pending(&bench, SESSION).await;
    assert_eq!((asked.road, asked.key.run.as_str(), asked.call.as_str()), (Road::Mcp, "run-1", "call_1"));
    bench.answer(&asked, Answer::option(0)).await;
    let answer = events.answer().await;
    assert_eq!(text(&answer), "A");
    assert!(answer["result"].get("structuredContent").is_none(), "OpenClaw would show it before the answer");
    let entry = bench.question(SESSION, |e| e.key == asked.key).await.value;
    assert_eq!(entry.returned(), None, "only the Gateway's tool result proves that it arrived");
}

#[tokio::test]
async fn the_same_question_in_two_sessions_is_never_asked_in_the_wrong_one() {
    let bench = Bench::start().await;
    let adapter = bench.adapter().await;
    bench.bind(OTHER_SESSION).await;
    let known = Client::start(&adapter, OPENCLAW).await;
    let new = Client::start(&adapter, OPENCLAW).await;
    introduce(&bench, &adapter, &known).await;

    let both_start = async |call: &str| {
        bench.tool_start(SESSION, "run-1", call, &choices()).await;
        bench.tool_start(OTHER_SESSION, "run-2", call, &choices()).await;
    };
    both_start("call_1").await;
    let mut unknown = new.call(&adapter, json!(2), &choices()).await;
    let refused = unknown.answer().await;
    let told: Value = serde_json::from_str(text(&refused)).unwrap();
    assert_eq!((&told["status"], &told["reason"]), (&json!("undeliverable"), &json!("ambiguous_identity")));

    // A client whose session is known finds its own.
    both_start("call_2").await;
    let mut events = known.call(&adapter, json!(2), &choices()).await;
    let asked = pending(&bench, SESSION).await;
    bench.answer(&asked, Answer::option(1)).await;
    assert_eq!(text(&events.answer().await), "B");
}

#[tokio::test]
async fn two_calls_that_one_tool_call_could_belong_to_are_both_refused() {
    let bench = Bench::start().await;
    let adapter = bench.adapter().await;
    let (one, two) = (Client::start(&adapter, OPENCLAW).await, Client::start(&adapter, OPENCLAW).await);
    let args = choices();
    let (mut first, mut second) =
        tokio::join!(one.call(&adapter, json!(1), &args), two.call(&adapter, json!(1), &args));
    bench.tool_start(SESSION, "run-1", "call_1", &args).await;
    for events in [&mut first, &mut second] {
        assert!(text(&events.answer().await).contains("ambiguous_identity"));
    }
    assert!(bench.bus.all_questions().await.unwrap().is_empty());
}

#[tokio::test]
async fn a_call_of_the_gateway_without_its_tool_call_is_undeliverable() {
    let bench = Bench::start().await;
    let adapter = bench.adapter().await;
    let client = Client::start(&adapter, OPENCLAW).await;
    let mut events = client.call(&adapter, json!(1), &choices()).await;
    let answer = events.answer().await;
    assert!(text(&answer).contains("could not be shown"));
    assert_eq!(answer["result"]["isError"], false);
    assert!(bench.bus.all_questions().await.unwrap().is_empty());
}

#[tokio::test]
async fn a_call_goes_on_after_a_restart_by_its_last_event_id() {
    let bench = Bench::start().await;
    let adapter = bench.adapter().await;
    let client = Client::start(&adapter, OPENCLAW).await;
    introduce(&bench, &adapter, &client).await;
    bench.tool_start(SESSION, "run-1", "call_1", &choices()).await;
    let mut events = client.call(&adapter, json!(7), &choices()).await;
    let first = events.next().await.unwrap();
    let asked = pending(&bench, SESSION).await;
    let address = adapter.address;
    drop(adapter);
    assert_eq!(events.next().await, None);

    let adapter = bench.adapter_at(address).await;
    let mut resumed = client.resume(&adapter, &first.id).await;
    bench.answer(&asked, Answer::option(1)).await;
    let answer = resumed.answer().await;
    assert_eq!((text(&answer), &answer["id"]), ("B", &json!(7)));
    // Another replica repeats it, as long as the call is not known to have it.
    let other = bench.adapter().await;
    assert_eq!(client.resume(&other, &first.id).await.answer().await, answer);
}

#[tokio::test]
async fn a_stopping_adapter_ends_its_streams_and_another_goes_on_with_them() {
    let bench = Bench::start().await;
    let (one, two) = (bench.adapter().await, bench.adapter().await);
    let client = Client::start(&one, OTHER).await;
    let mut events = client.call(&one, json!(1), &choices()).await;
    let first = events.next().await.unwrap();
    let asked = pending(&bench, &client.own_session()).await;
    one.stop();
    assert_eq!(events.next().await, None);
    let mut resumed = client.resume(&two, &first.id).await;
    bench.answer_as_operator(&asked, Answer::option(0)).await;
    assert_eq!(text(&resumed.answer().await), "A");
    // There it can also be cancelled.
    let mut events = client.call(&two, json!(2), &choices()).await;
    let first = events.next().await.unwrap();
    let asked = pending(&bench, &client.own_session()).await;
    let three = bench.adapter().await;
    let _resumed = client.resume(&three, &first.id).await;
    client.cancel(&three, json!(2)).await;
    assert!(matches!(bench.returned(&asked).await, Returned::Unconfirmed { .. }));
}

#[tokio::test]
async fn a_stream_is_resumed_only_by_its_own_session() {
    let bench = Bench::start().await;
    let adapter = bench.adapter().await;
    let client = Client::start(&adapter, OTHER).await;
    let first = client.call(&adapter, json!(1), &choices()).await.next().await.unwrap();
    let stranger = Client::start(&adapter, OTHER).await;
    let get = |client: &Client, id: &str| client.request(&adapter, Method::GET).header("last-event-id", id);
    assert_eq!(get(&stranger, &first.id).send().await.unwrap().status(), 404);
    assert_eq!(get(&client, "made-up").send().await.unwrap().status(), 400);
    // There is no stream of the server's own.
    assert_eq!(client.request(&adapter, Method::GET).send().await.unwrap().status(), 405);
}

#[tokio::test]
async fn a_question_that_died_with_its_process_before_it_was_written_is_told_as_lost() {
    let bench = Bench::start().await;
    let adapter = bench.adapter().await;
    let client = Client::start(&adapter, OTHER).await;
    let mut events = client.call(&adapter, json!(1), &choices()).await;
    let first = events.next().await.unwrap();
    let asked = pending(&bench, &client.own_session()).await;
    let never = first.id.replace(&asked.key.question, "0000");
    let answer = client.resume(&adapter, &never).await.answer().await;
    assert_eq!(answer["result"]["isError"], true);
    assert!(text(&answer).contains("ask again"));
}

#[tokio::test]
async fn a_cancelled_request_cancels_its_question_and_an_unknown_one_nothing() {
    let bench = Bench::start().await;
    let adapter = bench.adapter().await;
    let client = Client::start(&adapter, OTHER).await;
    let _events = client.call(&adapter, json!(5), &choices()).await;
    let asked = pending(&bench, &client.own_session()).await;
    client.cancel(&adapter, json!(0)).await;
    client.cancel(&adapter, json!("5")).await;
    client.cancel(&adapter, json!(5)).await;
    assert_eq!(bench.returned(&asked).await, Returned::Unconfirmed { why: "caller_cancelled".into() });
    let entry = bench.question(&client.own_session(), |_| true).await.value;
    assert_eq!(entry.decision().unwrap().outcome, Outcome::Cancelled { reason: CancelReason::Caller });
}

#[tokio::test]
async fn a_request_that_is_cancelled_before_its_session_is_known_asks_nothing() {
    let bench = Bench::start().await;
    let adapter = bench.adapter().await;
    let client = Client::start(&adapter, OTHER).await;
    let mut events = client.call(&adapter, json!(5), &choices()).await;
    client.cancel(&adapter, json!(5)).await;
    assert_eq!(events.next().await, None);
    assert!(bench.bus.all_questions().await.unwrap().is_empty());
}

#[tokio::test]
async fn the_end_of_an_mcp_session_cancels_what_it_has_open() {
    let bench = Bench::start().await;
    let adapter = bench.adapter().await;
    let client = Client::start(&adapter, OTHER).await;
    let _events = client.call(&adapter, json!(5), &choices()).await;
    let asked = pending(&bench, &client.own_session()).await;
    assert_eq!(client.request(&adapter, Method::DELETE).send().await.unwrap().status(), 204);
    assert!(matches!(bench.returned(&asked).await, Returned::Unconfirmed { .. }));
    assert_eq!(bench.bus.mcp_session(GATEWAY, &client.id).await.unwrap(), None, "nothing is kept of it");
}

#[tokio::test]
async fn refusals_are_json_rpc_errors_that_name_the_way_out() {
    let bench = Bench::start().await;
    let adapter = bench.adapter().await;
    let client = Client::start(&adapter, OTHER).await;
    let ping = json!({"jsonrpc": "2.0", "id": 1, "method": "ping"});
    let large = json!({"jsonrpc": "2.0", "id": 1, "method": "ping", "params": "x".repeat(1 << 20)});
    let post = || client.request(&adapter, Method::POST);
    let bare = |method| request(&adapter, method);
    let table = [
        (post().header("origin", "http://evil.example").json(&ping), 403, "adapter.http.origins"),
        (post().header("origin", "null").json(&ping), 403, "adapter.http.origins"),
        (testkit::http_client().post(format!("{}/mcp", adapter.url)).json(&ping), 401, "Bearer TOKEN"),
        (post().json(&large), 413, "1048576 bytes"),
        (bare(Method::POST).json(&ping), 400, "the one that initialize gave"),
        (bare(Method::DELETE), 400, "the one that initialize gave"),
        (bare(Method::DELETE).header("mcp-session-id", "x"), 404, "initialize again"),
        (client.request(&adapter, Method::GET).header("last-event-id", "x"), 400, "of this server"),
    ];
    for (request, status, way_out) in table {
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), status, "{way_out}");
        let body: Value = response.json().await.unwrap();
        assert_eq!((&body["jsonrpc"], body["error"]["code"].is_i64()), (&json!("2.0"), true), "{body}");
        assert!(body["error"]["message"].as_str().unwrap().contains(way_out), "{body}");
    }
    for origin in ["http://localhost:5173", "https://tools.example"] {
        assert_eq!(post().header("origin", origin).json(&ping).send().await.unwrap().status(), 200);
    }
}

#[tokio::test]
async fn what_a_client_got_that_can_prove_nothing_is_unconfirmed_after_its_time_to_come_again() {
    let bench = Bench::start().await;
    let adapter = bench.adapter().await;
    let client = Client::start(&adapter, OTHER).await;
    let mut events =
        client.call(&adapter, json!(1), &json!({"question": "The password?", "secret": true})).await;
    let session = client.own_session();
    let asked = pending(&bench, &session).await;
    let sealed = bench.seal(&asked, "o1", "hunter2-771");
    bench.answer_as_operator(&asked, sealed).await;
    let answer = events.answer().await;
    assert_eq!(text(&answer), "hunter2-771");
    assert_eq!(answer["result"]["structuredContent"]["answers"]["answer"], json!(["answered (hidden)"]));
    let mut decided = bench.question(&session, |e| !e.is_pending()).await;
    assert_eq!(decided.value.returned(), None);

    // An adapter that has not written the response keeps it, to the limit.
    drop(adapter);
    let _other = bench.adapter().await;
    let State::Decided { decision } = &mut decided.value.state else { panic!("{decided:?}") };
    decision.at = Timestamp(decision.at.0 - 24 * 3_600_000);
    bench.bus.write_decided(&decided.value, decided.revision).await.unwrap();
    assert_eq!(bench.returned(&asked).await, Returned::Unconfirmed { why: "expired".into() });
    assert!(!bench.question(&session, |_| true).await.value.holds_secret());
    assert!(!bench.on_disk("hunter2-771"));
}

#[tokio::test]
async fn a_client_without_proof_that_comes_back_late_still_gets_its_secret() {
    let bench = Bench::start().await;
    let adapter = bench.adapter().await;
    let client = Client::start(&adapter, OTHER).await;
    let mut events = client.call(&adapter, json!(1), &json!({"question": "Token?", "secret": true})).await;
    let first = events.next().await.unwrap();
    let asked = pending(&bench, &client.own_session()).await;
    drop((events, adapter));
    // Answered hours ago, and no adapter was there to hand it over.
    let reply = crate::bench::reply(&asked, "o1", bench.seal(&asked, "o1", "hunter2-772")).reply;
    let stored = bench.bus.question(&asked.key).await.unwrap().unwrap();
    let long_ago = Timestamp(Timestamp::now().0 - 3 * 3_600_000);
    let Verdict::Decide(decided) = stored.value.reply(&reply, long_ago) else { panic!("{asked:?}") };
    bench.bus.write_decided(&decided, stored.revision).await.unwrap();
    let adapter = bench.adapter().await;
    assert_eq!(text(&client.resume(&adapter, &first.id).await.answer().await), "hunter2-772");
}

#[tokio::test]
async fn an_older_client_gets_no_event_that_it_can_not_read() {
    let bench = Bench::start().await;
    let adapter = bench.adapter().await;
    let client = Client::start_with(&adapter, OTHER, "2025-06-18").await;
    let mut events = client.call(&adapter, json!(1), &choices()).await;
    let first = events.next().await.unwrap();
    assert_eq!(first.data, None, "it would read the data as JSON");
    let asked = pending(&bench, &client.own_session()).await;
    bench.answer_as_operator(&asked, Answer::option(0)).await;
    assert_eq!(text(&events.answer().await), "A");
}

#[tokio::test]
async fn what_can_not_be_asked_is_a_tool_error_for_the_model() {
    let bench = Bench::start().await;
    let adapter = bench.adapter().await;
    let client = Client::start(&adapter, OTHER).await;
    let response = client.call(&adapter, json!(1), &json!({"choices": ["A"]})).await.response;
    let answer: Value = response.json().await.unwrap();
    assert_eq!(answer["result"]["isError"], true);
    assert_eq!(text(&answer), "`question` must be text, got: nothing");
}

#[tokio::test]
async fn the_tool_has_the_name_and_the_schema_of_its_specification() {
    let bench = Bench::start().await;
    let adapter = bench.adapter().await;
    let client = Client::start(&adapter, OTHER).await;
    let list = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list"});
    let answer: Value = client.post(&adapter, &list).await.json().await.unwrap();
    let [tool] = answer["result"]["tools"].as_array().unwrap().as_slice() else { panic!("{answer}") };
    assert_eq!(tool["name"], "request_user_input");
    assert_eq!(tool["inputSchema"]["required"], json!(["question"]));
    assert_eq!(tool["inputSchema"]["properties"]["secret"]["type"], "boolean");
    assert_eq!(tool["inputSchema"]["properties"]["choices"]["items"]["type"], "string");
}

#[tokio::test]
async fn requests_that_do_not_follow_the_protocol_are_refused_with_what_is_wrong() {
    let bench = Bench::start().await;
    let adapter = bench.adapter().await;
    let client = Client::start(&adapter, OTHER).await;
    let send = async |request: RequestBuilder| {
        let response = request.send().await.unwrap();
        (response.status().as_u16(), response.text().await.unwrap())
    };
    let ping = json!({"jsonrpc": "2.0", "id": 1, "method": "ping"});
    let unauthorized = testkit::http_client().post(format!("{}/mcp", adapter.url)).json(&ping);
    let unknown = json!({"jsonrpc": "2.0", "id": 1, "method": "resources/list"});
    let no_tool = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "x"}});
    let post = || client.request(&adapter, Method::POST);
    let table = [
        (unauthorized, 401, "bearer"),
        (request(&adapter, Method::POST).json(&ping), 400, "mcp-session-id"),
        (request(&adapter, Method::POST).header("mcp-session-id", "x").json(&ping), 404, "initialize again"),
        (
            request(&adapter, Method::POST).header("mcp-protocol-version", "2024-11-05").json(&ping),
            400,
            "2025-11-25",
        ),
        (post().body("[]"), 400, "-32700"),
        (post().json(&json!({"jsonrpc": "2.0", "id": [1], "method": "ping"})), 400, "-32600"),
        (post().json(&json!({"jsonrpc": "2.0", "id": "x".repeat(401), "method": "ping"})), 400, "400 bytes"),
        (post().json(&unknown), 200, "-32601"),
        (post().json(&no_tool), 200, "-32602"),
        (post().json(&ping), 200, "result"),
    ];
    for (request, status, says) in table {
        let (got, body) = send(request).await;
        assert!(got == status && body.to_lowercase().contains(says), "{status} {says}: {got} {body}");
    }
    until("no question", async || bench.bus.all_questions().await.ok().filter(Vec::is_empty)).await;
}
