//! How many questions may wait at once (rule R2 of docs/protocol.md).

use serde::Deserialize;

/// Most pending questions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Of one run.
    pub per_run: usize,
    /// Of one session.
    pub per_session: usize,
    /// Of all sessions of one user.
    pub per_user: usize,
}

/// How many pending questions were asked before one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AskedBefore {
    /// Of its run.
    pub run: usize,
    /// Of its session.
    pub session: usize,
    /// Of its user.
    pub user: usize,
}

impl Limits {
    /// The rule by which one more question is too many; `None` when it may wait too.
    pub fn exceeded(&self, before: AskedBefore) -> Option<&'static str> {
        if before.run >= self.per_run {
            return Some("too_many_pending_in_the_run");
        }
        if before.session >= self.per_session {
            return Some("too_many_pending_in_the_session");
        }
        (before.user >= self.per_user).then_some("too_many_pending_for_the_user")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_limit_that_is_reached_is_named() {
        let limits = Limits { per_run: 2, per_session: 3, per_user: 4 };
        let table = [
            ((0, 0, 0), None),
            ((1, 2, 3), None),
            ((2, 2, 2), Some("too_many_pending_in_the_run")),
            ((1, 3, 3), Some("too_many_pending_in_the_session")),
            ((1, 2, 4), Some("too_many_pending_for_the_user")),
            ((9, 9, 9), Some("too_many_pending_in_the_run")),
        ];
        for ((run, session, user), rule) in table {
            assert_eq!(limits.exceeded(AskedBefore { run, session, user }), rule);
        }
    }
}
