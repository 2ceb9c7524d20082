//! The scripted model provider over HTTP, as an OpenAI client sees it.

use serde_json::{Value, json};
use testkit::http_client;
use testkit::model::{ModelOptions, ScriptedModel};

async fn post(model: &ScriptedModel, body: &Value) -> reqwest::Response {
    let url = format!("{}/chat/completions", model.url());
    http_client().post(url).json(body).send().await.unwrap()
}

async fn chunks(model: &ScriptedModel, text: &str) -> Vec<Value> {
    let body = json!({"stream": true, "messages": [{"role": "user", "content": text}]});
    let events = post(model, &body).await.text().await.unwrap();
    let mut lines: Vec<&str> = events.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    assert_eq!(lines.pop(), Some("[DONE]"));
    lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn text(chunks: &[Value]) -> Vec<&str> {
    let texts = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str());
    texts.filter(|text| !text.is_empty()).collect()
}

#[tokio::test]
async fn streams_an_echo_word_by_word() {
    let model = ScriptedModel::start().await.unwrap();
    let chunks = chunks(&model, "hello there").await;
    assert_eq!(text(&chunks), ["echo: ", "hello ", "there"]);
    assert_eq!(chunks[chunks.len() - 2]["choices"][0]["finish_reason"], "stop");
}

#[tokio::test]
async fn streams_pieces_of_a_chosen_size() {
    let options = ModelOptions { piece: Some(3) };
    let model = ScriptedModel::listen("127.0.0.1:0".parse().unwrap(), options).await.unwrap();
    assert_eq!(text(&chunks(&model, "añb").await), ["ech", "o: ", "añb"]);
}

#[tokio::test]
async fn streams_several_tool_calls_with_ids_of_their_own() {
    let model = ScriptedModel::start().await.unwrap();
    let chunks = chunks(&model, r#"CALL a {"x":1} CALL b {"y":{}}"#).await;
    let calls: Vec<&Value> = chunks
        .iter()
        .map(|chunk| &chunk["choices"][0]["delta"]["tool_calls"][0])
        .filter(|call| !call.is_null())
        .collect();
    assert_eq!(calls[0]["function"]["name"], "a");
    assert_eq!(calls[1]["function"]["arguments"], r#"{"x":1}"#);
    assert_eq!((&calls[2]["index"], &calls[3]["index"]), (&json!(1), &json!(1)));
    assert_eq!(calls[3]["function"]["arguments"], r#"{"y":{}}"#);
    assert_ne!(calls[0]["id"], calls[2]["id"]);
    assert_eq!(chunks[chunks.len() - 2]["choices"][0]["finish_reason"], "tool_calls");
}

#[tokio::test]
async fn answers_without_streaming_and_keeps_what_it_was_asked() {
    let model = ScriptedModel::start().await.unwrap();
    let body = json!({"messages": [{"role": "user", "content": "CALL a {}"}], "mark": 7});
    let answer: Value = post(&model, &body).await.json().await.unwrap();
    let message = &answer["choices"][0]["message"];
    assert_eq!(message["tool_calls"][0]["function"]["name"], "a");

    let root = model.url().replace("/v1", "");
    let log: Value = http_client().get(format!("{root}/log")).send().await.unwrap().json().await.unwrap();
    assert_eq!(log, json!([body]));
    assert_eq!(model.requests(), [body]);
}
