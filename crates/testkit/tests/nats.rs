//! The real nats-server, started, killed and started again.

use std::io::{BufRead, BufReader};
use std::net::TcpStream;

use testkit::nats::{NatsOptions, NatsServer};

fn info(server: &NatsServer) -> serde_json::Value {
    let address = server.url().replace("nats://", "");
    let mut line = String::new();
    BufReader::new(TcpStream::connect(address).unwrap()).read_line(&mut line).unwrap();
    serde_json::from_str(line.strip_prefix("INFO ").unwrap()).unwrap()
}

#[tokio::test]
async fn takes_connections_with_jetstream_as_soon_as_it_is_started() {
    let server = NatsServer::start().await.unwrap();
    assert_eq!(info(&server)["jetstream"], true);
}

#[tokio::test]
async fn comes_back_on_its_port_and_store() {
    let server = NatsServer::start_with(NatsOptions { fsync: true, ..NatsOptions::default() }).await.unwrap();
    let (url, id) = (server.url(), info(&server)["server_id"].clone());
    let kept = server.store_dir().join("kept");
    std::fs::create_dir_all(server.store_dir()).unwrap();
    std::fs::write(&kept, "x").unwrap();

    server.kill();
    assert!(TcpStream::connect(url.replace("nats://", "")).is_err());
    server.start_again().await.unwrap();

    assert_eq!(server.url(), url);
    assert_ne!(info(&server)["server_id"], id);
    assert!(kept.exists());
}

#[tokio::test]
async fn many_run_side_by_side_and_leave_nothing() {
    let starts = (0..6).map(|_| NatsServer::start());
    let servers: Vec<NatsServer> = futures::future::try_join_all(starts).await.unwrap();
    let urls: std::collections::HashSet<String> = servers.iter().map(NatsServer::url).collect();
    assert_eq!(urls.len(), 6);
    let folders: Vec<_> = servers.iter().map(NatsServer::store_dir).collect();
    drop(servers);
    assert!(folders.iter().all(|folder| !folder.exists()));
}

#[tokio::test]
async fn a_config_that_the_server_refuses_is_told_with_its_words() {
    let error =
        NatsServer::start_with(NatsOptions { config: "no_such_setting: 1".into(), ..NatsOptions::default() })
            .await
            .unwrap_err();
    assert!(error.to_string().contains("no_such_setting"), "{error}");
}
