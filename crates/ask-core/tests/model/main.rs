//! The rules of docs/protocol.md, checked in every interleaving of models whose decisions are the
//! product's own functions. docs/model.md says what is modelled and how to read a trace.

mod call;
mod native;
mod record;
mod say;
mod search;
mod shown;
