//! The Gateway's address.

use std::{fmt, net::Ipv6Addr};

use ::url::Host;

/// Port the Gateway listens on unless configured otherwise.
pub const DEFAULT_PORT: u16 = 18789;

/// A Gateway address, normalised to a WebSocket URL.
///
/// Accepted: `host`, `host:port`, an IPv6 address bare or in brackets, and any of these with
/// `http://`, `https://`, `ws://` or `wss://` before and a path behind. Without a scheme the port
/// defaults to 18789, with one to that scheme's own (80 or 443), as in a browser. Query and
/// fragment are dropped, so the address bar of the Gateway's Control UI can be pasted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewayUrl {
    tls: bool,
    host: Host,
    port: u16,
    path: String,
}

/// Why a text is no Gateway address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("gateway address {given:?}: {problem}")]
pub struct UrlError {
    given: String,
    problem: String,
}

impl GatewayUrl {
    /// Reads an address as a person types it.
    pub fn parse(given: &str) -> Result<Self, UrlError> {
        read(given.trim()).map_err(|problem| UrlError {
            // What stands before an @ may be a password.
            given: match given.trim().rsplit_once('@') {
                Some((_, rest)) => format!("…@{rest}"),
                None => given.trim().to_owned(),
            },
            problem,
        })
    }

    /// Whether the connection is encrypted (`wss`).
    pub fn is_tls(&self) -> bool {
        self.tls
    }

    /// Host for a TCP connection; an IPv6 address has no brackets.
    pub fn host(&self) -> String {
        match &self.host {
            Host::Ipv6(address) => address.to_string(),
            other => other.to_string(),
        }
    }

    /// TCP port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Whether this names the local machine.
    pub fn is_loopback(&self) -> bool {
        match &self.host {
            Host::Domain(name) => name == "localhost" || name.ends_with(".localhost"),
            Host::Ipv4(address) => address.is_loopback(),
            Host::Ipv6(address) => {
                address.is_loopback() || address.to_ipv4_mapped().is_some_and(|v4| v4.is_loopback())
            }
        }
    }
}

impl fmt::Display for GatewayUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { "wss" } else { "ws" };
        write!(f, "{scheme}://{}:{}{}", self.host, self.port, self.path)
    }
}

impl std::str::FromStr for GatewayUrl {
    type Err = UrlError;

    fn from_str(given: &str) -> Result<Self, UrlError> {
        Self::parse(given)
    }
}

fn read(text: &str) -> Result<GatewayUrl, String> {
    if text.is_empty() {
        return Err("is empty: give a host, as gateway:18789".to_owned());
    }
    let (tls, default_port, rest) = match text.split_once("://") {
        None => (false, DEFAULT_PORT, text),
        Some((scheme, rest)) => match scheme.to_ascii_lowercase().as_str() {
            "ws" | "http" => (false, 80, rest),
            "wss" | "https" => (true, 443, rest),
            _ => return Err(format!("scheme {scheme:?} is not ws, wss, http or https")),
        },
    };
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (authority, tail) = rest.split_at(end);
    if authority.contains('@') {
        return Err("holds a user or password: the token has a setting of its own".to_owned());
    }
    let (host, port) = read_authority(authority)?;
    let port = match port {
        None => default_port,
        Some(digits) => read_port(digits)?,
    };
    Ok(GatewayUrl { tls, host, port, path: read_path(tail)? })
}

fn read_authority(authority: &str) -> Result<(Host, Option<&str>), String> {
    if let Some(inside) = authority.strip_prefix('[') {
        let (address, behind) = inside.split_once(']').ok_or("has a [ without a ]".to_owned())?;
        let address = address.parse::<Ipv6Addr>().map_err(|_| {
            format!("[{address}] is no IPv6 address: write names and IPv4 addresses without brackets")
        })?;
        let port = match behind.strip_prefix(':') {
            Some(port) => Some(port),
            None if behind.is_empty() => None,
            None => return Err(format!("{behind:?} after the ] is no port")),
        };
        return Ok((Host::Ipv6(address), port));
    }
    if authority.matches(':').count() > 1 {
        let address = authority.parse::<Ipv6Addr>().map_err(|_| {
            "has several colons and is no IPv6 address: with a port write [::1]:18789".to_owned()
        })?;
        return Ok((Host::Ipv6(address), None));
    }
    let (host, port) = match authority.split_once(':') {
        Some((host, port)) => (host, Some(port)),
        None => (authority, None),
    };
    if host.is_empty() {
        return Err("has no host".to_owned());
    }
    let host = Host::parse(host).map_err(|e| format!("host {host:?}: {e}"))?;
    Ok((host, port))
}

fn read_port(digits: &str) -> Result<u16, String> {
    let wrong = || format!("port {digits:?} is not a number from 1 to 65535");
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(wrong());
    }
    match digits.parse() {
        Ok(0) | Err(_) => Err(wrong()),
        Ok(port) => Ok(port),
    }
}

/// Path to request at the upgrade; it starts with a slash.
fn read_path(tail: &str) -> Result<String, String> {
    let end = tail.find(['?', '#']).unwrap_or(tail.len());
    let path = tail[..end].trim_end_matches('/');
    match path.chars().find(|c| !c.is_ascii_graphic()) {
        Some(c) => Err(format!("path {path:?} holds {c:?}: write it percent-encoded")),
        None if path.is_empty() => Ok("/".to_owned()),
        None => Ok(path.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_a_person_types_becomes_a_websocket_url() {
        for (given, expected) in [
            ("gateway", "ws://gateway:18789/"),
            ("  gateway  ", "ws://gateway:18789/"),
            ("gateway:1234", "ws://gateway:1234/"),
            ("gateway:1234/", "ws://gateway:1234/"),
            ("127.0.0.1", "ws://127.0.0.1:18789/"),
            ("Gateway.Example.ORG:80", "ws://gateway.example.org:80/"),
            ("http://gateway:18789", "ws://gateway:18789/"),
            ("http://gateway", "ws://gateway:80/"),
            ("https://gateway", "wss://gateway:443/"),
            ("HTTPS://gateway:8443/openclaw/", "wss://gateway:8443/openclaw"),
            ("ws://127.0.0.1:18789", "ws://127.0.0.1:18789/"),
            ("wss://gateway/a/b", "wss://gateway:443/a/b"),
            ("::1", "ws://[::1]:18789/"),
            ("[::1]", "ws://[::1]:18789/"),
            ("[::1]:19000", "ws://[::1]:19000/"),
            ("ws://::1", "ws://[::1]:80/"),
            ("2001:db8::7", "ws://[2001:db8::7]:18789/"),
            ("http://h:1/chat?session=agent:main:x#token=t", "ws://h:1/chat"),
            ("bücher.example", "ws://xn--bcher-kva.example:18789/"),
        ] {
            let url = GatewayUrl::parse(given).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(url.to_string(), expected, "{given}");
            assert_eq!(GatewayUrl::parse(&url.to_string()), Ok(url), "{given} is stable");
        }
    }

    #[test]
    fn what_is_no_address_is_refused_with_the_reason() {
        for (given, part) in [
            ("", "is empty"),
            ("   ", "is empty"),
            ("ftp://gateway", "scheme \"ftp\""),
            ("ws://", "has no host"),
            (":18789", "has no host"),
            ("[gateway]:18789", "[gateway] is no IPv6 address"),
            ("[127.0.0.1]:18789", "is no IPv6 address"),
            ("[::1", "has a [ without a ]"),
            ("[::1]18789", "after the ] is no port"),
            ("[fe80::1%eth0]:18789", "is no IPv6 address"),
            ("a:b:c", "several colons"),
            ("::1:18789", "several colons"),
            ("gateway:1:2", "several colons"),
            ("gateway:¹⁸", "port \"¹⁸\""),
            ("gateway:٣", "port \"٣\""),
            ("gateway:+80", "port \"+80\""),
            ("gateway:", "port \"\""),
            ("gateway:0", "port \"0\""),
            ("gateway:65536", "port \"65536\""),
            ("gate way", "host \"gate way\""),
            ("gateway/a b", "holds ' '"),
            ("ws://me:pw@gateway", "user or password"),
        ] {
            let error = GatewayUrl::parse(given).expect_err(given).to_string();
            assert!(error.contains(part), "{given:?}: {error}");
            assert!(!error.contains("pw"), "{error}");
        }
    }

    #[test]
    fn loopback_is_told_from_the_network() {
        for (given, expected) in [
            ("localhost", true),
            ("127.0.0.1", true),
            ("127.1.2.3", true),
            ("::1", true),
            ("::ffff:127.0.0.1", true),
            ("openclaw", false),
            ("10.0.0.4", false),
            ("localhost.example.org", false),
        ] {
            assert_eq!(GatewayUrl::parse(given).unwrap().is_loopback(), expected, "{given}");
        }
    }
}
