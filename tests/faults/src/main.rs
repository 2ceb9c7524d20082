//! `./dev faults`.

use std::collections::{BTreeSet, VecDeque};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use ask_bus::{Effect, Mutant};
use clap::Parser;
use faults::checker::{Finding, Kind};
use faults::deadlines::Deadlines;
use faults::matrix::{Case, cases};
use faults::plan::Plan;
use faults::settle::Settled;
use faults::world::{Service, SharedWorld, World, WorldOptions};
use serde_json::json;

/// Kills, breaks and repeats everything, and checks what came of it. Without options: the matrix
/// and 300 histories
#[derive(Debug, Parser)]
#[command(name = "faults", version)]
struct Cli {
    /// A crash before and after every write and acknowledgement, and of nats-server at each step
    #[arg(long)]
    matrix: bool,
    /// Only cases whose name has this in it
    #[arg(long, value_name = "TEXT", requires = "matrix")]
    only: Option<String>,
    /// Random histories, with the seeds from --from on
    #[arg(long, value_name = "N")]
    histories: Option<u64>,
    /// The first seed
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    from: u64,
    /// One history again
    #[arg(long, value_name = "SEED")]
    seed: Option<u64>,
    /// So many questions fall due within one second, while nats-server and both routers are killed
    #[arg(long, value_name = "N")]
    deadlines: Option<usize>,
    /// Weakened variants of the product; the checker must find each
    #[arg(long)]
    mutants: bool,
    /// The histories and cases run with this variant of the product
    #[arg(long, value_name = "NAME", value_parser = mutant)]
    mutant: Option<Mutant>,
    /// How many worlds run side by side
    #[arg(long, value_name = "N", default_value_t = 4)]
    worlds: usize,
    /// Stop at the first finding
    #[arg(long)]
    fail_fast: bool,
}

fn mutant(name: &str) -> Result<Mutant, String> {
    let known = || Mutant::ALL.iter().map(|mutant| mutant.name()).collect::<Vec<_>>().join(", ");
    let found = Mutant::ALL.iter().copied().find(|mutant| mutant.name() == name);
    found.ok_or_else(|| format!("there are {}", known()))
}

#[tokio::main]
async fn main() -> ExitCode {
    match run(Cli::parse()).await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("faults: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// One piece of work.
#[derive(Debug, Clone)]
enum Job {
    Case(usize, Box<Case>),
    History(Box<Plan>),
}

impl Job {
    fn name(&self) -> String {
        match self {
            Self::Case(_, case) => case.name.clone(),
            Self::History(plan) => format!("seed {}", plan.seed),
        }
    }

    /// In which worlds it can run.
    fn late_as_message(&self) -> bool {
        match self {
            Self::Case(_, case) => case.late_as_message,
            Self::History(plan) => plan.late_as_message,
        }
    }
}

/// What came of all.
#[derive(Default)]
struct Sum {
    done: usize,
    covered: BTreeSet<String>,
    histories: usize,
    lives: usize,
    findings: Vec<(String, Finding)>,
}

async fn run(cli: Cli) -> Result<bool> {
    let began = Instant::now();
    let folder = tempfile::Builder::new().prefix("askbus-faults-").tempdir()?;
    let programs = std::env::current_exe()?.parent().context("programs beside this one")?.to_owned();
    for service in Service::ALL {
        let program = programs.join(service.program());
        if !program.is_file() {
            bail!("{} is missing: `./dev faults` builds all that is needed", program.display());
        }
    }
    let options = |name: &str| WorldOptions {
        programs: programs.clone(),
        folder: folder.path().join(name),
        mutant: cli.mutant,
        crash_provision: None,
        late_as_message: false,
        services: &Service::ALL,
    };
    if cli.mutants {
        return mutants(&options("mutants"), cli.worlds).await;
    }
    let all = !cli.matrix && cli.histories.is_none() && cli.seed.is_none() && cli.deadlines.is_none();
    let mut jobs = VecDeque::new();
    let whole_matrix = (cli.matrix || all) && cli.only.is_none();
    if cli.matrix || all {
        let wanted = |case: &Case| cli.only.as_ref().is_none_or(|only| case.name.contains(only));
        let cases = cases().into_iter().filter(wanted).enumerate();
        jobs.extend(cases.map(|(n, case)| Job::Case(n, Box::new(case))));
    }
    let histories = cli.histories.unwrap_or(if all { 300 } else { 0 });
    jobs.extend((cli.from..cli.from + histories).map(|seed| Job::History(Box::new(Plan::new(seed)))));
    jobs.extend(cli.seed.map(|seed| Job::History(Box::new(Plan::new(seed)))));

    let sum = match work(jobs, cli.worlds, cli.fail_fast, &options).await {
        Ok(sum) => sum,
        Err(error) => {
            return Err(error.context(format!("a world did not start; see {}", folder.keep().display())));
        }
    };
    let due = match cli.deadlines {
        Some(count) => match faults::deadlines::run(options("deadlines"), count).await {
            Ok(due) => Some(due),
            Err(error) => return Err(error.context(format!("see {}", folder.keep().display()))),
        },
        None => None,
    };
    let points = crash_points();
    let missing: Vec<&String> = points.difference(&sum.covered).filter(|_| whole_matrix).collect();
    let good = sum.findings.is_empty() && missing.is_empty() && due.as_ref().is_none_or(Deadlines::is_good);
    let count = |kind| sum.findings.iter().filter(|(_, finding)| finding.kind == kind).count();
    let mut line = json!({
        "crash_points": {"covered": sum.covered.len(), "of": points.len()},
        "histories": sum.histories,
        "lives": sum.lives,
        "lost": count(Kind::Lost),
        "doubled": count(Kind::Doubled),
        "misrouted": count(Kind::Misrouted),
        "untrue": count(Kind::Untrue),
        "seconds": began.elapsed().as_secs(),
    });
    if let Some(due) = &due {
        line["deadlines"] = json!(due);
    }
    if !good {
        let names: BTreeSet<&str> = sum.findings.iter().map(|(name, _)| name.as_str()).collect();
        eprintln!("faults: found something in: {}", names.into_iter().collect::<Vec<_>>().join("; "));
        if !missing.is_empty() {
            eprintln!("faults: not covered: {missing:?}");
        }
        eprintln!("faults: logs and records are in {}", folder.keep().display());
    }
    println!("{line}");
    Ok(good)
}

/// Works all jobs off, in several worlds at a time.
async fn work(
    jobs: VecDeque<Job>,
    worlds: usize,
    fail_fast: bool,
    options: &impl Fn(&str) -> WorldOptions,
) -> Result<Sum> {
    let total = jobs.len();
    let jobs = Arc::new(Mutex::new(jobs));
    let sum = Arc::new(Mutex::new(Sum::default()));
    let mut workers = tokio::task::JoinSet::new();
    for n in 0..worlds.min(total) {
        let (jobs, sum, options) = (jobs.clone(), sum.clone(), options(&format!("world-{n}")));
        workers.spawn(async move {
            let mut world: Option<SharedWorld> = None;
            let mut number = 0;
            loop {
                let policy = world.as_ref().map(|world| world.options().late_as_message);
                let Some(job) = next_job(&mut lock(&jobs), policy) else { return anyhow::Ok(()) };
                let began = Instant::now();
                let late_as_message = job.late_as_message();
                let fits = |world: &SharedWorld| world.options().late_as_message == late_as_message;
                let current = match world.take().filter(fits) {
                    Some(world) => world,
                    None => {
                        number += 1;
                        let folder = options.folder.join(number.to_string());
                        let started =
                            World::start(WorldOptions { folder, late_as_message, ..options.clone() }).await;
                        Arc::new(started.inspect_err(|_| lock(&jobs).clear())?)
                    }
                };
                let ran = match &job {
                    Job::Case(n, case) => case.run(&current, &format!("c{n}")).await,
                    Job::History(plan) => faults::histories::run(&current, plan).await,
                };
                let settled = match ran {
                    Ok(settled) => settled,
                    Err(error) => {
                        let what = format!("the world broke: {error:#}");
                        let finding =
                            Finding { kind: Kind::Lost, session: String::new(), what, heals: false };
                        Settled { findings: vec![finding], lives: 0, history: Default::default() }
                    }
                };
                let bad = !settled.findings.is_empty();
                note(&sum, total, &job, settled, began.elapsed(), &current.options().folder);
                if bad && fail_fast {
                    lock(&jobs).clear();
                }
                // What a finding leaves behind would be found again.
                if !bad {
                    world = Some(current);
                }
            }
        });
    }
    while let Some(done) = workers.join_next().await {
        done.context("a worker failed")??;
    }
    let sum = Arc::try_unwrap(sum).ok().context("all workers have ended")?;
    Ok(sum.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// The next piece of work, one for a world with this policy where there is any.
fn next_job(jobs: &mut VecDeque<Job>, policy: Option<bool>) -> Option<Job> {
    let fits = jobs.iter().position(|job| policy.is_none_or(|policy| job.late_as_message() == policy));
    jobs.remove(fits.unwrap_or(0))
}

/// All that a whole matrix covers, as `name:side`.
fn crash_points() -> BTreeSet<String> {
    Effect::ALL.iter().flat_map(|effect| ["before", "after"].map(|side| format!("{effect}:{side}"))).collect()
}

fn note(
    sum: &Mutex<Sum>,
    total: usize,
    job: &Job,
    settled: Settled,
    took: Duration,
    folder: &std::path::Path,
) {
    let mut sum = lock(sum);
    sum.done += 1;
    sum.lives += settled.lives;
    let name = job.name();
    match job {
        Job::Case(_, case) if settled.findings.is_empty() => sum.covered.extend(case.covers()),
        Job::Case(..) => {}
        Job::History(_) => sum.histories += 1,
    }
    let verdict = if settled.findings.is_empty() { "ok" } else { "FOUND" };
    let about = match job {
        Job::History(plan) => plan.title(),
        Job::Case(..) => String::new(),
    };
    let took = took.as_secs_f64();
    eprintln!("[{:>3}/{total}] {verdict:<5} {took:>5.1} s  {name}  {about}", sum.done);
    for finding in &settled.findings {
        eprintln!("           {:?}: {} ({})", finding.kind, finding.what, finding.session);
    }
    if !settled.findings.is_empty() {
        let record = json!({"name": name, "findings": settled.findings, "history": settled.history,
            "plan": match job { Job::History(plan) => json!(plan), Job::Case(..) => json!(null) }});
        let file: PathBuf = folder.join("record.json");
        if let Err(error) = std::fs::write(&file, record.to_string()) {
            eprintln!("faults: {} can't be written: {error}", file.display());
        }
    }
    sum.findings.extend(settled.findings.into_iter().map(|finding| (name.clone(), finding)));
}

/// Each mutant must be found, and what it does must be what is found.
async fn mutants(options: &WorldOptions, worlds: usize) -> Result<bool> {
    let mut found = serde_json::Map::new();
    for &mutant in Mutant::ALL {
        let case = |text: &str| cases().into_iter().find(|case| case.name.starts_with(text));
        // Where the mutant acts, and some histories.
        let points: &[&str] = match mutant {
            Mutant::Ttl => &["decided:before:1 (expiry"],
            Mutant::AckFirst => &["chat_done:after:1", "chat_done:after:2"],
            Mutant::NoRevision | Mutant::ToldEarly => &["decided:before:1", "decided:after:1 (late"],
            Mutant::DoubleSend => &["chat_done:before:1", "chat_done:before:2"],
        };
        let mut jobs: VecDeque<Job> = points
            .iter()
            .filter_map(|text| case(text))
            .enumerate()
            .map(|(n, case)| Job::Case(n, Box::new(case)))
            .collect();
        jobs.extend((1..=12).map(|seed| Job::History(Box::new(Plan::new(seed)))));
        let make = |name: &str| WorldOptions {
            folder: options.folder.join(mutant.name()).join(name),
            mutant: Some(mutant),
            ..options.clone()
        };
        let sum = work(jobs, worlds, true, &make).await?;
        let by_checker = |(_, finding): &&(String, Finding)| !finding.session.is_empty();
        let caught = sum.findings.iter().find(by_checker).is_some();
        eprintln!("faults: the mutant {} is {}", mutant.name(), if caught { "found" } else { "NOT found" });
        let first = sum
            .findings
            .iter()
            .find(by_checker)
            .map(|(name, finding)| format!("{:?} in {name}: {}", finding.kind, finding.what));
        found.insert(mutant.name().into(), json!({"found": caught, "by": first}));
    }
    let good = found.values().all(|one| one["found"] == true);
    println!("{}", json!({"mutants": found}));
    Ok(good)
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
