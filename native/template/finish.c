/* The end of a script in a fork of the template.
 *
 * After its last step that a script can observe, Python releases its static objects one by one. That changes hundreds of
 * pages, which a fork has to copy first, and the end of the process releases all of them anyway. Audit events of Python's
 * clean-up come between the two: there we return from Py_FinalizeEx to its caller, as its last line would, by the tables
 * from which every debugger unwinds the stack. Where those do not show the call, Python goes on as usual.
 *
 * The first of the two events comes before the state of the interpreter is cleared. Objects of a script that only that state
 * refers to, such as the values of context variables, would not be finalized: the caller looks for them. Those that cannot be
 * found are the functions that a script has registered for codecs, forks and audit events. */
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

#include "python.h"
#include "template.h"

#pragma weak dlopen /* Python has loaded the library that it is in, where that is not the C library */
#pragma weak dlsym

#ifdef __x86_64__
/* What the library of the compiler provides for unwinding, and the function to return from. */
static struct finishing {
    uintptr_t finalize;
    int (*backtrace)(int (*)(void *, void *), void *);
    uintptr_t (*ip_of)(void *);
    uintptr_t (*cfa_of)(void *);
    uintptr_t (*register_of)(void *, int);
    uintptr_t (*function_at)(uintptr_t);
} with;

/* Where the short Py_FinalizeEx of Python 3.13 and newer jumps to, as its last step: to return from there is to return from
 * Py_FinalizeEx. Its other callers are of the same library and call that function directly. */
static uintptr_t continued_at;

/* The registers that a called function leaves as they were, by their numbers in the tables. */
static const int numbers[] = {3, 6, 12, 13, 14, 15};
enum { SAVED = sizeof numbers / sizeof *numbers, GO_ON = 0, STOP = 5 };
static struct caller { uintptr_t saved[SAVED], stack, ip; } caller;
static int is_next, has_failed;

static int on_frame(void *frame, void *arg)
{
    (void)arg;
    uintptr_t ip = with.ip_of(frame);
    if (!is_next) {
        uintptr_t function = with.function_at(ip - 1);
        is_next = function == with.finalize || function == continued_at;
        return GO_ON;
    }
    for (int i = 0; i < SAVED; i++)
        caller.saved[i] = with.register_of(frame, numbers[i]);
    caller.stack = with.cfa_of(frame);
    caller.ip = ip;
    return STOP;
}

void return_from_finalize(void)
{
    is_next = 0;
    caller.ip = 0;
    with.backtrace(on_frame, NULL);
    if (!caller.ip)
        return;
    __asm__ volatile("movq 0(%0), %%rbx\n\t"
                     "movq 8(%0), %%rbp\n\t"
                     "movq 16(%0), %%r12\n\t"
                     "movq 24(%0), %%r13\n\t"
                     "movq 32(%0), %%r14\n\t"
                     "movq 40(%0), %%r15\n\t"
                     "movq 48(%0), %%rsp\n\t"
                     "xorl %%eax, %%eax\n\t"
                     "jmpq *56(%0)"
                     :
                     : "D"(&caller)
                     : "memory");
    __builtin_unreachable();
}

/* An audit hook of Python. `data` is not NULL if the interpreter need not be cleared. */
static int on_audit(const char *event, void *arguments, void *data)
{
    (void)arguments;
    const char *last = data ? "cpython.PyInterpreterState_Clear" : "cpython._PySys_ClearAuditHooks";
    if (strcmp(event, "sys.unraisablehook") == 0)
        has_failed = 1; /* perhaps the output could not be written, and then the exit code is another */
    else if (!has_failed && strcmp(event, last) == 0)
        return_from_finalize();
    return 0;
}

static int is_inside(uintptr_t address, uintptr_t function)
{
    return with.function_at(address + 1) == function; /* which takes an address for that after a call */
}

/* The target of the jump with which a short function ends, or the function itself. Bytes within another instruction do not
 * pass for such a jump: they would have to give the very first byte of a function. */
static uintptr_t continuation_of(uintptr_t function)
{
    enum { SHORT = 64, JUMP = 0xe9, JUMP_SIZE = 5 };
    for (uintptr_t at = function; at < function + SHORT && is_inside(at + JUMP_SIZE - 1, function); at++) {
        /* NOLINTNEXTLINE(performance-no-int-to-ptr): the code of a function that the unwinder knows */
        const unsigned char *code = (const unsigned char *)at;
        int32_t distance;
        memcpy(&distance, code + 1, sizeof distance);
        uintptr_t target = at + JUMP_SIZE + (uintptr_t)(intptr_t)distance;
        if (*code == JUMP && is_inside(target, target))
            return target;
    }
    return function;
}

int can_finish(void)
{
    void *unwinder = dlopen ? dlopen("libgcc_s.so.1", RTLD_NOW | RTLD_LOCAL) : NULL;
    if (!unwinder || !Py_FinalizeEx)
        return 0;
    void *found[] = {dlsym(unwinder, "_Unwind_Backtrace"), dlsym(unwinder, "_Unwind_GetIP"), dlsym(unwinder, "_Unwind_GetCFA"),
                     dlsym(unwinder, "_Unwind_GetGR"), dlsym(unwinder, "_Unwind_FindEnclosingFunction")};
    for (size_t i = 0; i < sizeof found / sizeof *found; i++)
        if (!found[i])
            return 0;
    with.finalize = (uintptr_t)Py_FinalizeEx;
    _Static_assert(sizeof with == sizeof with.finalize + sizeof found, "one for each");
    memcpy((char *)&with + sizeof with.finalize, found, sizeof found);
    continued_at = continuation_of(with.finalize);
    return 1;
}

int finish_at_event(int is_early)
{
    return PySys_AddAuditHook(on_audit, is_early ? &with : NULL);
}
#else
int can_finish(void)
{
    return 0;
}

int finish_at_event(int is_early)
{
    (void)is_early;
    return 0;
}

void return_from_finalize(void)
{
}
#endif
