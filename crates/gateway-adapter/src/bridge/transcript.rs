//! What the transcript of a session holds, looked for from its end backwards.

use crate::openclaw::calls::History;
use crate::openclaw::client::{Client, GatewayError};

/// How many pages are read: [`super::HISTORY`] rows each, so up to 5,000 rows.
const PAGES: usize = 25;

/// How a search of a transcript ended.
pub(super) enum Search<T> {
    Found(T),
    /// It is not there.
    Nothing,
    /// It is not in what was read; there is more.
    NothingInPart,
}

/// Looks through the pages older than the last `from` rows, until `find` has found something.
/// Where `from` is `None`, there are none.
///
/// # Errors
/// A page can't be read.
pub(super) async fn search<T>(
    client: &Client,
    session: &str,
    mut from: Option<u64>,
    find: impl Fn(&History) -> Option<T>,
) -> Result<Search<T>, GatewayError> {
    for _ in 0..PAGES {
        let Some(offset) = from else { return Ok(Search::Nothing) };
        let page = client.chat_history_before(session, super::HISTORY, offset).await?;
        if let Some(found) = find(&page) {
            return Ok(Search::Found(found));
        }
        from = page.next_offset.filter(|next| *next > offset);
    }
    Ok(if from.is_none() { Search::Nothing } else { Search::NothingInPart })
}
